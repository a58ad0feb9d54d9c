# SPDX-License-Identifier: Apache-2.0
"""The casts of a linear layer in float8 training: torchao's configuration, with torchao's names.

A linear layer has three products, each of two operands:

    output       input       @ weight.T
    grad_input   grad_output @ weight
    grad_weight  grad_output.T @ input
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lowbit.formats.base import require

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class ScalingType(enum.Enum):
    """Whether an operand is cast to float8."""

    DYNAMIC = "dynamic"
    """The operand is cast, with scales that are computed from its range in each product."""
    DISABLED = "disabled"
    """The operand is not cast."""


class ScalingGranularity(enum.Enum):
    """The part of an operand that shares a scale."""

    TENSORWISE = "tensorwise"
    """One scale for the whole operand."""
    AXISWISE = "axiswise"
    """One scale per row or column: for the values that are summed up in one element of the product."""


class Float8LinearRecipeName(enum.Enum):
    """Names of predefined configurations, for `Float8LinearConfig.from_recipe_name`."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True, slots=True)
class CastConfig:
    """How one operand of a product is cast.

    Args:
        scaling_type: ``DYNAMIC`` or ``DISABLED``.
        scaling_granularity: ``TENSORWISE`` or ``AXISWISE``.
        target_dtype: torch.float8_e4m3fn or torch.float8_e5m2. None is e5m2 for the gradient of the output, and e4m3fn
            otherwise.

    Raises:
        TypeError: scaling_type or scaling_granularity is not a member of its enum.
        ValueError: target_dtype is not one of the above.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, kind in (("scaling_type", ScalingType), ("scaling_granularity", ScalingGranularity)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"CastConfig: {name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        if self.target_dtype not in (None, E4M3, E5M2):
            raise ValueError(f"CastConfig: target_dtype must be {E4M3} or {E5M2}, got {self.target_dtype}")

    @property
    def is_cast(self) -> bool:
        return self.scaling_type is ScalingType.DYNAMIC

    def __str__(self) -> str:
        if not self.is_cast:
            return "float"
        return f"{str(self.target_dtype).removeprefix('torch.float8_')} {self.scaling_granularity.value}"


@dataclass(frozen=True, slots=True)
class Float8GemmConfig:
    """How one product is computed.

    Args:
        use_fast_accum: whether CUDA uses faster, less precise accumulators; on a CPU, sums are always float32.
    """

    use_fast_accum: bool = False


_CAST = CastConfig()


@dataclass(frozen=True, slots=True)
class Float8LinearConfig:
    """Configuration of float8 training (torchao's). The default is the recipe "tensorwise".

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: the cast of each operand in the first product
            that uses it.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input, cast_config_grad_output_for_grad_weight:
            the cast of the same operand in its other product; None is the same cast.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: how the three products are computed.
        enable_fsdp_float8_all_gather: must be False.
        pad_inner_dim: no effect; operands are padded where a GPU needs it.
        emulate: whether CUDA multiplies the float8 values in float, as a CPU always does.
        round_scales_to_power_of_2: whether scales are rounded down to powers of two.

    Raises:
        TypeError: a cast is not a `CastConfig`.
        ValueError: only one operand of a product is cast, an operand has two different target_dtypes, or
            enable_fsdp_float8_all_gather is not False.

    Example:
        >>> config = lowbit.training.Float8LinearConfig.from_recipe_name("rowwise")
        >>> lowbit.training.convert_to_float8_training(model, config=config)
    """

    cast_config_input: CastConfig = _CAST
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = _CAST
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = _CAST
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        require("Float8LinearConfig", "enable_fsdp_float8_all_gather", self.enable_fsdp_float8_all_gather, False,
                "the only one")  # fmt: skip
        for operand, product, dtype in (
            ("input", "grad_weight", E4M3),
            ("weight", "grad_input", E4M3),
            ("grad_output", "grad_weight", E5M2),
        ):
            names = f"cast_config_{operand}", f"cast_config_{operand}_for_{product}"
            first, second = (getattr(self, name) for name in names)
            for name, cast in zip(names, (first, first if second is None else second), strict=True):
                if not isinstance(cast, CastConfig):
                    raise TypeError(f"Float8LinearConfig: {name} must be a CastConfig, got {type(cast).__name__}")
                if cast.target_dtype is None:
                    cast = replace(cast, target_dtype=dtype)
                object.__setattr__(self, name, cast)
            dtypes = [getattr(self, name).target_dtype for name in names]
            if dtypes[0] != dtypes[1]:
                raise ValueError(f"Float8LinearConfig: target_dtype of {names[1]} must be {dtypes[0]}, got {dtypes[1]}")
        for one, other in (
            ("input", "weight"),
            ("grad_output", "weight_for_grad_input"),
            ("input_for_grad_weight", "grad_output_for_grad_weight"),
        ):
            casts = [getattr(self, f"cast_config_{name}") for name in (one, other)]
            if casts[0].is_cast != casts[1].is_cast:
                raise ValueError(
                    f"Float8LinearConfig: cast_config_{one} and cast_config_{other} must both be DYNAMIC or both be "
                    f"DISABLED, got {casts[0].scaling_type.name} and {casts[1].scaling_type.name}"
                )

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """Return the configuration of a recipe.

        Args:
            recipe_name: "tensorwise" has one scale per tensor, and gradients in e5m2. "rowwise" has one scale per row
                or column, rounded to powers of two, and all operands in e4m3. "rowwise_with_gw_hp" is like "rowwise",
                but has a single scale for the weight in grad_input, and computes grad_weight in the model's dtype.

        Raises:
            ValueError: the recipe is unknown.
        """
        names = [name.value for name in Float8LinearRecipeName]
        recipe = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
        if recipe not in names:
            raise ValueError(f"Float8LinearConfig: recipe_name must be one of {names}, got {recipe_name!r}")
        if recipe == "tensorwise":
            return Float8LinearConfig()
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=E4M3)
        rowwise = Float8LinearConfig(rows, None, rows, None, rows, round_scales_to_power_of_2=True)
        if recipe == "rowwise":
            return rowwise
        disabled = CastConfig(ScalingType.DISABLED, target_dtype=E4M3)
        return replace(
            rowwise,
            cast_config_weight_for_grad_input=CastConfig(),
            cast_config_input_for_grad_weight=disabled,
            cast_config_grad_output_for_grad_weight=disabled,
        )

    def __str__(self) -> str:
        casts = {
            name: str(getattr(self, f"cast_config_{name}"))
            for name in ("input", "weight", "grad_output", "input_for_grad_weight", "weight_for_grad_input",
                         "grad_output_for_grad_weight")
        }  # fmt: skip
        return ", ".join(
            f"{name}={cast}"
            for name, cast in casts.items()
            if "_for_" not in name or cast != casts[name.split("_for_")[0]]
        )


def float8_config_of(config: Any) -> Float8LinearConfig:
    """Return a configuration of lowbit unchanged, and convert one of torchao.

    Raises:
        TypeError: ``config`` is anything else.
    """
    if isinstance(config, Float8LinearConfig):
        return config
    kind = type(config)
    if kind.__name__ != "Float8LinearConfig" or not kind.__module__.startswith("torchao."):
        raise TypeError(f"convert_to_float8_training: config must be a Float8LinearConfig, got {kind.__name__}")
    given = {field.name: getattr(config, field.name) for field in fields(Float8LinearConfig)}
    for name, value in given.items():
        if name.startswith("cast_config"):
            granularity = ScalingGranularity(value.scaling_granularity.value)
            given[name] = CastConfig(ScalingType(value.scaling_type.value), granularity, value.target_dtype)
        elif name.startswith("gemm_config"):
            given[name] = Float8GemmConfig(value.use_fast_accum)
    return Float8LinearConfig(**given)
