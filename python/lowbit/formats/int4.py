# SPDX-License-Identifier: Apache-2.0
"""int4 weights: weight-only, and with int8 activations.

w = scale * (code - zero), code 0..15; zero is 8 for symmetric weights.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from lowbit.formats.algorithms import HQQ, Algorithm
from lowbit.formats.base import (
    FormatConfig,
    MappingType,
    PerRow,
    granularity_of,
    group_size_of,
    integer_spec,
    mapping_of,
    require,
    x_format_of,
)
from lowbit.formats.spec import LinearSpec


@dataclass(frozen=True, slots=True)
class Int4WeightOnlyConfig(FormatConfig):
    """Configuration of int4 weights with float activations.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        int4_packing_format: "plain"; the weight is always packed in lowbit's own layout.
        int4_choose_qparams_algorithm: a name, or a member of torchao's enum. "tinygemm" follows ``mapping_type``,
            ``scale`` and ``algorithm``; "hqq" is the same as ``algorithm=lowbit.HQQ()``.
        int4_tile_packed_ntile: must be 8, as in torchao.
        version: must be 2, as in torchao.
        mapping_type: symmetric or asymmetric weights. The default is symmetric (torchao's tinygemm: asymmetric).
        scale: "search" chooses the scale and zero point of each group with the smallest error; "absmax" computes them
            from the group's range, as torchao does. None is "search", or "absmax" for ``SYMMETRIC_NO_CLIPPING_ERR``.
        algorithm: how codes are chosen: ``lowbit.GPTQ()``, ``lowbit.HQQ()``, or None for the nearest code.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128))
    """

    group_size: int | None = 128
    set_inductor_config: bool = True
    int4_packing_format: str = "plain"
    int4_choose_qparams_algorithm: str = "tinygemm"
    int4_tile_packed_ntile: int = 8
    version: int = 2
    _: KW_ONLY
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale: str | None = None
    algorithm: Algorithm | None = None
    function: ClassVar[str] = "int4_weight_only"

    def __post_init__(self) -> None:
        packing = getattr(self.int4_packing_format, "value", self.int4_packing_format)
        require(self.function, "int4_packing_format", packing, "plain", "the packed form is lowbit's own")
        algorithm = getattr(self.int4_choose_qparams_algorithm, "value", self.int4_choose_qparams_algorithm)
        if algorithm not in ("tinygemm", "hqq"):
            raise ValueError(
                f"{self.function}: int4_choose_qparams_algorithm must be 'tinygemm' or 'hqq', got "
                f"int4_choose_qparams_algorithm={algorithm!r}"
            )
        if algorithm == "hqq" and self.algorithm is None:
            object.__setattr__(self, "algorithm", HQQ())
        if algorithm == "hqq" and not isinstance(self.algorithm, HQQ):
            raise ValueError(
                f"{self.function}: algorithm must be HQQ() or None with int4_choose_qparams_algorithm='hqq', got "
                f"{self.algorithm}"
            )
        require(self.function, "int4_tile_packed_ntile", self.int4_tile_packed_ntile, 8, "a CUDA layout's")
        require(self.function, "version", self.version, 2, "the only one")
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        group_size = group_size_of(self.function, self.group_size)
        mapping = mapping_of(self.function, "mapping_type", self.mapping_type)
        return integer_spec(self.function, "int4", group_size, mapping, scale=self.scale, algorithm=self.algorithm)


int4_weight_only = Int4WeightOnlyConfig


@dataclass(frozen=True, slots=True)
class Int8DynamicActivationInt4WeightConfig(FormatConfig):
    """Configuration of int4 weights with activations that are rounded to int8 on the fly: the fastest format.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        mapping_type: symmetric or asymmetric weights.
        act_mapping_type: symmetric or asymmetric activations. The default is symmetric (torchao: asymmetric), because
            one scale per row and group is both faster and more precise than a zero point per row.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        act_granularity: the scales of symmetric activations: ``PerRow()`` for one scale per row; None for one per row
            and weight group.
        scale: "search" chooses the scale and zero point of each group with the smallest error; "absmax" computes them
            from the group's range, as torchao does. None is "search", or "absmax" for ``SYMMETRIC_NO_CLIPPING_ERR``.
        algorithm: how codes are chosen: ``lowbit.GPTQ()``, ``lowbit.HQQ()``, or None for the nearest code.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    """

    group_size: int | None = 32
    _: KW_ONLY
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.SYMMETRIC
    set_inductor_config: bool = True
    act_granularity: PerRow | None = None
    scale: str | None = None
    algorithm: Algorithm | None = None
    function: ClassVar[str] = "int8_dynamic_activation_int4_weight"

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        group_size = group_size_of(self.function, self.group_size)
        mapping = mapping_of(self.function, "mapping_type", self.mapping_type)
        act_group = None
        if self.act_granularity is not None:
            act_group = granularity_of(self.function, "act_granularity", self.act_granularity)
        x_format = x_format_of(self.function, group_size, act_group, self.act_mapping_type)
        return integer_spec(
            self.function, "int4", group_size, mapping, x_format, scale=self.scale, algorithm=self.algorithm
        )


int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
