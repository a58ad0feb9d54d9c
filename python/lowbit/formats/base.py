# SPDX-License-Identifier: Apache-2.0
"""What all configurations share: the base class, torchao's classes that describe scales, and checks of fields."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.algorithms import HQQ, Algorithm, algorithm_of
from lowbit.formats.spec import LinearSpec

GROUP_SIZES = (32, 64, 128, 256)


class MappingType(enum.Enum):
    """How a range of values is mapped to codes (torchao's enum). Each value is the name that ``_C`` uses."""

    SYMMETRIC = "symmetric"
    SYMMETRIC_NO_CLIPPING_ERR = "symmetric_no_clipping_err"
    ASYMMETRIC = "asymmetric"


@dataclass(frozen=True, slots=True)
class PerRow:
    """One scale per row: per output channel of a weight, per token of an activation.

    Args:
        dim: the dimension that a scale spans, as in torchao; -1.
    """

    dim: int = -1


@dataclass(frozen=True, slots=True)
class PerAxis:
    """One scale per index of ``axis``. For a weight, ``PerAxis(0)`` is the same as `PerRow`."""

    axis: int


@dataclass(frozen=True, slots=True)
class PerToken:
    """One scale per token of an activation; the same as `PerRow`."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale per group of ``group_size`` consecutive values along k."""

    group_size: int


Granularity = PerRow | PerAxis | PerToken | PerGroup


class FormatConfig:
    """Base class of every configuration that ``quantize_`` accepts. A configuration is immutable, and is checked when
    it is created."""

    __slots__ = ()
    function: ClassVar[str]  # name of the lower-case function that creates it, for error messages
    quant_method: ClassVar[str] = "lowbit"  # by which transformers finds our quantizer for a quantization_config

    def __post_init__(self) -> None:
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        """Return the spec for a weight of ``dtype``.

        Raises:
            ValueError: a field is outside its accepted values; the message names it.
        """
        raise NotImplementedError

    def refuses(self, weight: Tensor) -> str:
        """Return the reason why this finite float weight ``[n, k]`` cannot be stored in this format, or an empty
        string."""
        return ""

    def __str__(self) -> str:
        """Return the call that creates this configuration, with the arguments that differ from the defaults."""
        changed = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        default = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        told = ", ".join(
            f"{name}={_short(value)}"
            for name, value in changed.items()
            if name == "group_size" or value != default[name]
        )
        return f"{self.function}({told})"


def _short(value: Any) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def group_size_of(function: str, group_size: int | None) -> int:
    """Check and return a group size; None (per channel) becomes 0."""
    if group_size is None:
        return 0
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"{function}: group_size must be {sizes} or None (per channel), got group_size={group_size!r}")
    return group_size


def granularity_of(function: str, argument: str, granularity: Any) -> int:
    """Return the group size of a granularity, 0 for None. torchao's classes of the same names are accepted too."""
    kind = type(granularity).__name__
    per_row = {"PerRow": ("dim", (-1, 1)), "PerAxis": ("axis", (0,)), "PerToken": ("", ())}
    if granularity is None:
        return 0
    if kind in per_row:
        field, values = per_row[kind]
        if not field or getattr(granularity, field, values[0]) in values:
            return 0
    if kind == "PerGroup":
        return group_size_of(function, granularity.group_size)
    why = "; one scale for a whole tensor is less precise and no faster" if kind == "PerTensor" else ""
    raise ValueError(f"{function}: {argument} must be PerRow() or PerGroup(n), got {argument}={granularity!r}{why}")


def mapping_of(
    function: str, argument: str, value: Any, allowed: tuple[MappingType, ...] = tuple(MappingType)
) -> MappingType:
    """Return the `MappingType` for ``value``: a MappingType, a member of torchao's enum, or the name of one."""
    name = getattr(value, "name", value)
    for mapping in allowed:
        if isinstance(name, str) and name.upper() == mapping.name:
            return mapping
    names = ", ".join(f"MappingType.{mapping.name}" for mapping in allowed)
    raise ValueError(f"{function}: {argument} must be one of {names}, got {argument}={value!r}")


def act_mapping_of(function: str, value: Any) -> MappingType:
    """Check and return the mapping type of activations."""
    return mapping_of(function, "act_mapping_type", value, (MappingType.SYMMETRIC, MappingType.ASYMMETRIC))


def require(function: str, argument: str, value: Any, only: Any, why: str) -> None:
    """Raise unless a field that exists for torchao's sake has the only supported value."""
    if value != only:
        raise ValueError(f"{function}: {argument} must be {only!r} ({why}), got {argument}={value!r}")


def integer_spec(
    function: str,
    format: str,
    group_size: int,
    mapping: MappingType,
    x_format: str = "float",
    *,
    scale: str | None = None,
    algorithm: Algorithm | None = None,
) -> LinearSpec:
    """Check ``scale`` and ``algorithm``, and return the spec of an integer weight. HQQ makes the weight asymmetric."""
    if scale not in (None, *_C.SCALE_CHOICES):
        names = ", ".join(map(repr, _C.SCALE_CHOICES))
        raise ValueError(f"{function}: scale must be one of {names} or None, got scale={scale!r}")
    no_clipping = mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR
    if algorithm is not None and isinstance(algorithm_of(function, algorithm), HQQ):
        require(function, "scale", scale, None, "HQQ takes the range of each group")
        if no_clipping:
            raise ValueError(f"{function}: mapping_type must be MappingType.ASYMMETRIC with HQQ, got {mapping}")
        mapping = MappingType.ASYMMETRIC
    if scale == "search" and no_clipping:
        raise ValueError(f"{function}: scale must be 'absmax' or None with {mapping}: a searched scale may clip")
    return LinearSpec(format, group_size, mapping is MappingType.ASYMMETRIC, x_format, mapping.value, scale, algorithm)


def group_sizes_of(function: str, granularity: Any) -> tuple[int, int]:
    """Return the group sizes of activations and weight, from a pair of granularities or from one for both."""
    pair = granularity if isinstance(granularity, (tuple, list)) else (granularity,) * 2
    if len(pair) != 2:
        raise ValueError(
            f"{function}: granularity must be one granularity, or a pair for activations and weight, got {len(pair)}"
        )
    act, weight = (granularity_of(function, "granularity", item) for item in pair)
    return act, weight


def x_format_of(function: str, group_size: int, act_group_size: int | None, act_mapping_type: Any) -> str:
    """Return the x_format, which says how activations are rounded.

    Symmetric activations may share the groups of the weight, and do so if ``act_group_size`` is None. Asymmetric
    activations have one scale and one zero point per row.
    """
    act_mapping = act_mapping_of(function, act_mapping_type)
    if act_group_size is None:
        act_group_size = group_size if act_mapping is MappingType.SYMMETRIC else 0
    if act_group_size and act_mapping is MappingType.ASYMMETRIC:
        raise ValueError(
            f"{function}: asymmetric activations must be per row, got groups of {act_group_size}"
        )
    if act_group_size and act_group_size != group_size:
        raise ValueError(
            f"{function}: groups of activations must be those of the weight, "
            f"got {act_group_size} and {group_size or 'per channel'}"
        )
    if act_mapping is MappingType.ASYMMETRIC:
        return "int8_row_asymmetric"
    return "int8_group" if act_group_size else "int8_row"
