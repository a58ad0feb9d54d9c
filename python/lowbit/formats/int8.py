# SPDX-License-Identifier: Apache-2.0
"""int8 weights: weight-only, and with int8 activations.

w = scale * (code - zero), code 0..255; zero is 128 for symmetric weights.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from lowbit.formats.base import (
    FormatConfig,
    Granularity,
    MappingType,
    PerGroup,
    PerRow,
    act_mapping_of,
    granularity_of,
    group_size_of,
    group_sizes_of,
    integer_spec,
    mapping_of,
    require,
    x_format_of,
)
from lowbit.formats.spec import LinearSpec


@dataclass(frozen=True, slots=True)
class Int8WeightOnlyConfig(FormatConfig):
    """Configuration of int8 weights with float activations.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        granularity: torchao's newer form of ``group_size``: ``PerRow()`` or ``PerGroup(n)``; None is ``PerRow()``. If
            both arguments set a group size, they must agree.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        version: must be 2, as in torchao.
        mapping_type: symmetric or asymmetric weights.
        scale: "absmax" computes each scale from its group's range, "search" chooses the one with the smallest error;
            None is "absmax".

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_weight_only())
    """

    group_size: int | None = None
    granularity: Granularity | None = PerRow()
    set_inductor_config: bool = True
    version: int = 2
    _: KW_ONLY
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale: str | None = None
    function: ClassVar[str] = "int8_weight_only"

    def __post_init__(self) -> None:
        require(self.function, "version", self.version, 2, "the only one")
        group_size = group_size_of(self.function, self.group_size)
        granularity = granularity_of(self.function, "granularity", self.granularity)
        if group_size and granularity and group_size != granularity:
            raise ValueError(
                f"{self.function}: group_size and granularity must agree, "
                f"got group_size={group_size} granularity=PerGroup({granularity})"
            )
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        group_size = self.group_size or granularity_of(self.function, "granularity", self.granularity)
        mapping = mapping_of(self.function, "mapping_type", self.mapping_type)
        return integer_spec(self.function, "int8", group_size, mapping, scale=self.scale)


int8_weight_only = Int8WeightOnlyConfig


@dataclass(frozen=True, slots=True)
class Int8DynamicActivationInt8WeightConfig(FormatConfig):
    """Configuration of int8 weights with activations that are rounded to int8 on the fly.

    Args:
        act_mapping_type: symmetric or asymmetric activations. Asymmetric ones have one scale and zero point per row.
        weight_only_decode: must be False; a decode step uses the same weight and is fast.
        granularity: ``PerRow()``, ``PerGroup(n)``, or a pair (activations, weight); None is ``PerRow()`` for both.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        version: must be 2, as in torchao.
        reduce_range: must be False; the integer product is exact on every ISA, so nothing can saturate.
        mapping_type: symmetric or asymmetric weights.
        scale: "absmax" computes each scale from its group's range, "search" chooses the one with the smallest error;
            None is "absmax".

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.
    """

    act_mapping_type: MappingType = MappingType.SYMMETRIC
    weight_only_decode: bool = False
    granularity: Granularity | tuple[Granularity, Granularity] | None = PerRow()
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool = False
    _: KW_ONLY
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale: str | None = None
    function: ClassVar[str] = "int8_dynamic_activation_int8_weight"

    def __post_init__(self) -> None:
        require(self.function, "version", self.version, 2, "the only one")
        require(self.function, "weight_only_decode", self.weight_only_decode, False, "decode uses the same weight")
        require(self.function, "reduce_range", self.reduce_range, False, "the product is exact without")
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        mapping = mapping_of(self.function, "mapping_type", self.mapping_type)
        act_group, group_size = group_sizes_of(self.function, self.granularity)
        x_format = x_format_of(self.function, group_size, act_group, self.act_mapping_type)
        return integer_spec(self.function, "int8", group_size, mapping, x_format, scale=self.scale)


def int8_dynamic_activation_int8_weight(
    group_size: int | None = None,
    *,
    act_mapping_type: MappingType = MappingType.SYMMETRIC,
    mapping_type: MappingType = MappingType.SYMMETRIC,
    scale: str | None = None,
) -> Int8DynamicActivationInt8WeightConfig:
    """Return the configuration of int8 weights with int8 activations (W8A8).

    Symmetric activations have one scale per row and weight group, asymmetric ones one scale and one zero point per row.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        act_mapping_type, mapping_type, scale: the same as for `Int8DynamicActivationInt8WeightConfig`.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    """
    function = Int8DynamicActivationInt8WeightConfig.function
    weight = PerGroup(group_size) if group_size_of(function, group_size) else PerRow()
    act = weight if act_mapping_of(function, act_mapping_type) is MappingType.SYMMETRIC else PerRow()
    return Int8DynamicActivationInt8WeightConfig(
        act_mapping_type,
        granularity=(act, weight) if act != weight else weight,
        mapping_type=mapping_type,
        scale=scale,
    )
