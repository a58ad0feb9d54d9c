# SPDX-License-Identifier: Apache-2.0
"""The common part of the configurations: their base class, torchao's vocabulary for scales, and checks of fields."""

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
    """How a range of weights is mapped to codes (torchao's enum; each value is the name that ``_C`` uses)."""

    SYMMETRIC = "symmetric"
    SYMMETRIC_NO_CLIPPING_ERR = "symmetric_no_clipping_err"
    ASYMMETRIC = "asymmetric"


@dataclass(frozen=True, slots=True)
class PerRow:
    """One scale per row: per output channel of a weight, per token of an activation.

    Args:
        dim: torchao's; the dimension that a scale spans, -1.
    """

    dim: int = -1


@dataclass(frozen=True, slots=True)
class PerAxis:
    """One scale per index of ``axis``: ``PerAxis(0)`` of a weight is `PerRow`."""

    axis: int


@dataclass(frozen=True, slots=True)
class PerToken:
    """One scale per token of an activation: `PerRow`."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale per ``group_size`` neighbours along k."""

    group_size: int


Granularity = PerRow | PerAxis | PerToken | PerGroup


class FormatConfig:
    """Base of every configuration that ``quantize_`` takes. A configuration is immutable and checked when
    it is made."""

    __slots__ = ()
    function: ClassVar[str]  # the lower-case function that makes it: names it in errors

    def __post_init__(self) -> None:
        self.spec(torch.float32)

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        """Return the spec for a weight of ``dtype``.

        Raises:
            ValueError: a field has none of the values that it may have; names it.
        """
        raise NotImplementedError

    def refuses(self, weight: Tensor) -> str:
        """Say why this finite float weight ``[n, k]`` cannot be stored so, or return an empty string."""
        return ""

    def __str__(self) -> str:
        """Return the call that makes it, with the arguments that differ from the defaults."""
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
    """Check a group size; None (per channel) becomes 0."""
    if group_size is None:
        return 0
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"{function}: group_size must be {sizes} or None (per channel), got group_size={group_size!r}")
    return group_size


def granularity_of(function: str, argument: str, granularity: Any) -> int:
    """Return the group size of a granularity, 0 for None; torchao's own classes of these names are understood too."""
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
    """Return the mapping of this name: a MappingType, torchao's enum of the same names, or the name itself."""
    name = getattr(value, "name", value)
    for mapping in allowed:
        if isinstance(name, str) and name.upper() == mapping.name:
            return mapping
    names = ", ".join(f"MappingType.{mapping.name}" for mapping in allowed)
    raise ValueError(f"{function}: {argument} must be one of {names}, got {argument}={value!r}")


def act_mapping_of(function: str, value: Any) -> MappingType:
    """Check how activations are mapped."""
    return mapping_of(function, "act_mapping_type", value, (MappingType.SYMMETRIC, MappingType.ASYMMETRIC))


def require(function: str, argument: str, value: Any, only: Any, why: str) -> None:
    """Refuse a value of a torchao field that cannot be honoured here."""
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
    """Check how scales are chosen and codes found, and return the spec of an integer weight; HQQ
    makes it asymmetric."""
    if scale not in (None, *_C.SCALE_CHOICES):
        names = ", ".join(map(repr, _C.SCALE_CHOICES))
        raise ValueError(f"{function}: scale must be one of {names} or None, got scale={scale!r}")
    no_clipping = mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR
    if algorithm is not None and isinstance(algorithm_of(function, algorithm), HQQ):
        require(function, "scale", scale, None, "HQQ takes the range of each group")
        if no_clipping:
            raise ValueError(f"{function}: HQQ makes asymmetric weights, got mapping_type={mapping}")
        mapping = MappingType.ASYMMETRIC
    if scale == "search" and no_clipping:
        raise ValueError(f"{function}: scale must be 'absmax' or None with {mapping}: a searched scale may clip")
    return LinearSpec(format, group_size, mapping is MappingType.ASYMMETRIC, x_format, mapping.value, scale, algorithm)


def group_sizes_of(function: str, granularity: Any) -> tuple[int, int]:
    """Return the group sizes of activations and weight: of a pair of granularities, or of one for both."""
    pair = granularity if isinstance(granularity, (tuple, list)) else (granularity,) * 2
    if len(pair) != 2:
        raise ValueError(f"{function}: granularity must be one or a pair, got {len(pair)}")
    act, weight = (granularity_of(function, "granularity", item) for item in pair)
    return act, weight


def x_format_of(function: str, group_size: int, act_group_size: int | None, act_mapping_type: Any) -> str:
    """Return how activations are rounded. Groups of activations are the groups of the weight, for None where they are
    symmetric; a zero point is per row."""
    act_mapping = act_mapping_of(function, act_mapping_type)
    if act_group_size is None:
        act_group_size = group_size if act_mapping is MappingType.SYMMETRIC else 0
    if act_group_size and act_mapping is MappingType.ASYMMETRIC:
        raise ValueError(f"{function}: asymmetric activations must be per row, got groups of {act_group_size}")
    if act_group_size and act_group_size != group_size:
        raise ValueError(
            f"{function}: groups of activations must be those of the weight, "
            f"got {act_group_size} and {group_size or 'per channel'}"
        )
    if act_mapping is MappingType.ASYMMETRIC:
        return "int8_row_asymmetric"
    return "int8_group" if act_group_size else "int8_row"
