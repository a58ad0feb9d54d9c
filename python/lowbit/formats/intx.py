# SPDX-License-Identifier: Apache-2.0
"""Integer weights of 2 to 8 bits: weight-only, and with int8 activations.

w = scale * (code - zero), code 0..2^bits - 1; zero is 2^(bits - 1) for symmetric weights.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from lowbit.formats.algorithms import Algorithm
from lowbit.formats.base import (
    FormatConfig,
    Granularity,
    MappingType,
    PerAxis,
    PerGroup,
    granularity_of,
    group_size_of,
    integer_spec,
    mapping_of,
    x_format_of,
)
from lowbit.formats.spec import LinearSpec

INT_DTYPES = {getattr(torch, f"int{bits}"): f"int{bits}" for bits in range(2, 9)}
"""The integer formats by their torch dtypes."""


def int_format_of(function: str, dtype: torch.dtype) -> str:
    """Return the integer format of a torch dtype."""
    if dtype not in INT_DTYPES:
        raise ValueError(f"{function}: weight_dtype must be torch.int2 to torch.int8, got weight_dtype={dtype!r}")
    return INT_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class IntxWeightOnlyConfig(FormatConfig):
    """Configuration of integer weights of 2 to 8 bits with float activations.

    Args:
        weight_dtype: torch.int2 to torch.int8.
        granularity: ``PerAxis(0)`` for one scale per output channel, or ``PerGroup(n)``.
        mapping_type: symmetric or asymmetric weights.
        scale: "search" chooses the scale and zero point of each group with the smallest error; "absmax" computes them
            from the group's range, as torchao does. None is "search" for up to 4 bits, and "absmax" for more bits and
            for ``SYMMETRIC_NO_CLIPPING_ERR``.
        algorithm: how codes are chosen: ``lowbit.GPTQ()``, ``lowbit.HQQ()``, or None for the nearest code.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.
    """

    weight_dtype: torch.dtype = torch.int8
    granularity: Granularity = PerAxis(0)
    mapping_type: MappingType = MappingType.SYMMETRIC
    _: KW_ONLY
    scale: str | None = None
    algorithm: Algorithm | None = None
    function: ClassVar[str] = "intx_weight_only"

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        format = int_format_of(self.function, self.weight_dtype)
        group_size = granularity_of(self.function, "granularity", self.granularity)
        mapping = mapping_of(self.function, "mapping_type", self.mapping_type)
        return integer_spec(self.function, format, group_size, mapping, scale=self.scale, algorithm=self.algorithm)


def intx_weight_only(
    weight_dtype: torch.dtype = torch.int8,
    group_size: int | None = None,
    *,
    mapping_type: MappingType = MappingType.SYMMETRIC,
    scale: str | None = None,
    algorithm: Algorithm | None = None,
) -> IntxWeightOnlyConfig:
    """Return the configuration of integer weights of 2 to 8 bits with float activations.

    Args:
        weight_dtype: torch.int2 to torch.int8.
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        mapping_type, scale, algorithm: the same as for `IntxWeightOnlyConfig`.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.intx_weight_only(torch.int3, group_size=64))
    """
    size = group_size_of(IntxWeightOnlyConfig.function, group_size)
    return IntxWeightOnlyConfig(
        weight_dtype, PerGroup(size) if size else PerAxis(0), mapping_type, scale=scale, algorithm=algorithm
    )


@dataclass(frozen=True, slots=True)
class Int8DynamicActivationIntxWeightConfig(FormatConfig):
    """Configuration of integer weights of 2 to 8 bits with activations that are rounded to int8 on the fly.

    Args:
        weight_dtype: torch.int2 to torch.int8.
        weight_granularity: ``PerGroup(n)``, or ``PerAxis(0)`` for one scale per output channel.
        weight_mapping_type: symmetric or asymmetric weights.
        act_mapping_type: symmetric activations have one scale per row and group, asymmetric ones one scale and one zero
            point per row. The default is symmetric (torchao: asymmetric).
        scale, algorithm: the same as for `IntxWeightOnlyConfig`.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.
    """

    weight_dtype: torch.dtype = torch.int8
    weight_granularity: Granularity = PerGroup(32)
    weight_mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.SYMMETRIC
    _: KW_ONLY
    scale: str | None = None
    algorithm: Algorithm | None = None
    function: ClassVar[str] = "int8_dynamic_activation_intx_weight"

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        format = int_format_of(self.function, self.weight_dtype)
        group_size = granularity_of(self.function, "weight_granularity", self.weight_granularity)
        mapping = mapping_of(self.function, "weight_mapping_type", self.weight_mapping_type)
        x_format = x_format_of(self.function, group_size, None, self.act_mapping_type)
        return integer_spec(
            self.function, format, group_size, mapping, x_format, scale=self.scale, algorithm=self.algorithm
        )


def int8_dynamic_activation_intx_weight(
    weight_dtype: torch.dtype = torch.int8,
    group_size: int | None = 32,
    *,
    mapping_type: MappingType = MappingType.SYMMETRIC,
    act_mapping_type: MappingType = MappingType.SYMMETRIC,
    scale: str | None = None,
    algorithm: Algorithm | None = None,
) -> Int8DynamicActivationIntxWeightConfig:
    """Return the configuration of integer weights of 2 to 8 bits with int8 activations.

    Args:
        weight_dtype: torch.int2 to torch.int8.
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        mapping_type, act_mapping_type: symmetric or asymmetric weights and activations.
        scale, algorithm: the same as for `IntxWeightOnlyConfig`.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_intx_weight(torch.int6, group_size=64))
    """
    size = group_size_of(Int8DynamicActivationIntxWeightConfig.function, group_size)
    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype, PerGroup(size) if size else PerAxis(0), mapping_type, act_mapping_type,
        scale=scale, algorithm=algorithm,
    )  # fmt: skip
