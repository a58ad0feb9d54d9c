# SPDX-License-Identifier: Apache-2.0
"""float8_e4m3fn weights: weight-only, and with activations rounded to float8.

w = scale * float8, scale = amax / 448. A row of zeros has scale 0 and stays zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lowbit.formats.base import (
    FormatConfig,
    Granularity,
    PerGroup,
    granularity_of,
    group_size_of,
    group_sizes_of,
    require,
)
from lowbit.formats.spec import LinearSpec

_E4M3 = torch.float8_e4m3fn
_ONLY_DTYPE = "the only one; float8_e5m2 has a bit of precision less"


@dataclass(frozen=True, slots=True)
class Float8WeightOnlyConfig(FormatConfig):
    """Configuration of float8 weights with float activations.

    Args:
        weight_dtype: torch.float8_e4m3fn.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        version: must be 2, as in torchao.
        granularity: ``PerRow()`` or ``PerGroup(n)``; None is ``PerRow()``.
    """

    weight_dtype: torch.dtype = _E4M3
    set_inductor_config: bool = True
    version: int = 2
    granularity: Granularity | None = None
    function: ClassVar[str] = "float8_weight_only"

    def __post_init__(self) -> None:
        require(self.function, "weight_dtype", self.weight_dtype, _E4M3, _ONLY_DTYPE)
        require(self.function, "version", self.version, 2, "the only one")
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        return LinearSpec("fp8_e4m3", granularity_of(self.function, "granularity", self.granularity))


def float8_weight_only(group_size: int | None = None) -> Float8WeightOnlyConfig:
    """Return the configuration of float8 weights, per output channel or in groups along k.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.float8_weight_only())
    """
    size = group_size_of(Float8WeightOnlyConfig.function, group_size)
    return Float8WeightOnlyConfig(granularity=PerGroup(size) if size else None)


@dataclass(frozen=True, slots=True)
class Float8DynamicActivationFloat8WeightConfig(FormatConfig):
    """Configuration of float8 weights with activations that are rounded to float8 on the fly, with one scale per row.

    Each product of two float8 values is exact, and sums are float32. Use this format to reproduce the results of a
    model that was made for it; otherwise `float8_weight_only` is as fast and more precise.

    Args:
        activation_dtype, weight_dtype: torch.float8_e4m3fn.
        granularity: ``PerRow()``, or a pair (activations, weight) whose second item may be ``PerGroup(n)``. None is
            ``PerRow()`` (in torchao, one scale per tensor).
        packing_format: "plain"; the weight is always packed in lowbit's own layout.
        mm_config: no effect; sums are always float32.
        activation_value_lb, activation_value_ub: None; each row's scale follows from its own range.
        kernel_preference: no effect; `lowbit.force_kernel` selects a kernel row.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        version: must be 2, as in torchao.

    Example:
        >>> lowbit.quantize_(model, lowbit.float8_dynamic_activation_float8_weight())
    """

    activation_dtype: torch.dtype = _E4M3
    weight_dtype: torch.dtype = _E4M3
    granularity: Granularity | tuple[Granularity, Granularity] | None = None
    packing_format: str = "plain"
    mm_config: Any = None
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = None
    set_inductor_config: bool = True
    version: int = 2
    function: ClassVar[str] = "float8_dynamic_activation_float8_weight"

    def __post_init__(self) -> None:
        require(self.function, "activation_dtype", self.activation_dtype, _E4M3, _ONLY_DTYPE)
        require(self.function, "weight_dtype", self.weight_dtype, _E4M3, _ONLY_DTYPE)
        packing = getattr(self.packing_format, "value", self.packing_format)
        require(self.function, "packing_format", packing, "plain", "the packed form is lowbit's own")
        for name in ("activation_value_lb", "activation_value_ub"):
            require(self.function, name, getattr(self, name), None, "the range of a row is its own")
        require(self.function, "version", self.version, 2, "the only one")
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        act_group, group_size = group_sizes_of(self.function, self.granularity)
        require(self.function, "groups of activations", act_group, 0, "float8 activations have a scale per row")
        return LinearSpec("fp8_e4m3", group_size, x_format="float8_row")


float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
