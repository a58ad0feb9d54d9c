# SPDX-License-Identifier: Apache-2.0
"""The values that the numbers of a packed weight can have: its grid of scales, zero points and levels, by format.

A grid is without codes: rounding to it gives the codes, in any order of the channels. The codes of a float format are
its numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight, levels_of, split_scale
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.layout import repack_weight
from lowbit.quant.packing import pack_weight

_LEAST_HALF = 2.0**-14  # float16 below has fewer bits
_NO_CODES = torch.empty(0, device="cpu")


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """The scales and zero points of rows of a weight, as they are stored; a float format has none."""

    spec: LinearSpec
    k: int
    column_scale: Tensor | None = None  # float32 [n]
    group_scale: Tensor | None = None  # float16 [n, groups]; None: one scale per column
    zero: Tensor | None = None  # float16 [n, groups]; None: the weight is symmetric

    @classmethod
    def of(cls, packed: Tensor, stored: StoredWeight) -> tuple[WeightGrid, Tensor]:
        """Return the grid of a packed weight, and its codes ``[n, k]``."""
        spec = stored.spec
        if spec.is_float:
            numbers = torch.ops.lowbit.dequantize(repack_weight(packed, stored), *spec.weight_args(stored.n, stored.k))
            return cls(spec, stored.k), numbers.to(getattr(torch, spec.format))
        coded = CodedWeight.unpack(packed, stored)
        return cls(spec, stored.k, coded.column_scale, coded.group_scale, coded.zero), coded.codes

    @classmethod
    def joined(cls, grids: Sequence[WeightGrid]) -> WeightGrid:
        """Return the grid of the rows of all; the inverse of `rows`."""
        first = grids[0]
        stored = zip(*((grid.column_scale, grid.group_scale, grid.zero) for grid in grids), strict=True)
        return cls(first.spec, first.k, *(None if parts[0] is None else torch.cat(parts) for parts in stored))

    @property
    def group(self) -> int:
        """The number of channels that share a scale."""
        return self.spec.group_size or self.k

    def coded(self, codes: Tensor) -> CodedWeight:
        return CodedWeight(self.spec, codes, self.column_scale, self.group_scale, self.zero)

    def rows(self, part: slice) -> WeightGrid:
        """Return the grid of these rows."""
        stored = (self.column_scale, self.group_scale, self.zero)
        return WeightGrid(self.spec, self.k, *(None if values is None else values[part] for values in stored))

    def pack(self, codes: Tensor, layout: str) -> Tensor:
        """Return the packed weight of codes ``[n, k]``."""
        if self.spec.is_float:
            return pack_weight(codes, self.spec, layout=layout)[0].data
        return self.coded(codes).pack(layout)

    @property
    def scale(self) -> Tensor:
        """The scales, float32 ``[n, groups]``."""
        return self.coded(_NO_CODES).scale

    @property
    def zero_point(self) -> Tensor:
        """The zero points, float32 ``[n, groups]``; for a symmetric weight, the constant of its format."""
        return self.coded(_NO_CODES).zero_point

    @property
    def step(self) -> Tensor:
        """The mean distance of neighbours in each group ``[n, groups]``."""
        steps = self._steps_of_groups()
        if steps.kind != "lookup":
            return steps.scale
        levels = steps.levels[steps.order.int()]
        return steps.scale * ((levels[-1] - levels[0]) / (len(levels) - 1))

    def levels(self, codes: Tensor) -> Tensor:
        """Return what codes ``[n, k]`` mean before they are multiplied by their scales: ``[n, groups, group]``."""
        return self.steps().levels_of(self.grouped(codes))

    def steps(self) -> Steps:
        """Return the grid by groups: the numbers are those of `grouped`."""
        return self._steps_of_groups().changed(lambda values: values[..., None])

    def _steps_of_groups(self) -> Steps:
        if self.spec.is_float:
            return Steps(self.spec.format)
        return Steps(self.spec.format, self.scale, self.zero_point)

    def by_channels(self) -> Channels:
        return Channels(self._steps_of_groups().changed(lambda values: values.T.contiguous()), self.group)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values ``[n, k]`` of codes, float32."""
        return self.apart(self.steps().decode(self.grouped(codes)))

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes ``[n, k]`` of the nearest values."""
        return self.apart(self.steps().nearest(self.grouped(values)))

    def grouped(self, values: Tensor) -> Tensor:
        """Return ``[n, k]`` as ``[n, groups, group]``, padded with zeros."""
        more = -self.k % self.group
        return (torch.nn.functional.pad(values, (0, more)) if more else values).unflatten(1, (-1, self.group))

    def apart(self, values: Tensor) -> Tensor:
        """Return ``[n, groups, group]`` as ``[n, k]``; the inverse of `grouped`."""
        return values.flatten(1)[:, : self.k].contiguous()

    def chosen_for(self, weight: Tensor, inputs: InputMoments | None) -> WeightGrid:
        """Return the grid that ``quantize_`` would choose for a weight ``[n, k]``."""
        spec = replace(self.spec, algorithm=None)
        packed, _ = pack_weight(weight, spec, None if spec.takes_absmax else inputs)
        return WeightGrid.of(packed.data, StoredWeight(spec, *weight.shape, _C.LAYOUT))[0]

    def with_groups(self, other: WeightGrid, taken: Tensor) -> WeightGrid:
        """Return this grid with the groups of another where ``taken`` ``[n, groups]``. The others keep every bit,
        unless a row's new scale is 2^15 times its largest old one: float16 holds no such range."""
        if self.group_scale is None:
            return self.with_scales(other.scale, other.zero, taken)
        kept = (self._holds(other.scale) | ~taken).all(1)
        new = self.with_scales(other.scale, other.zero, taken & kept[:, None])
        split, parts = split_scale(torch.where(taken, other.scale, self.scale), self.spec.group_size)
        zero = self.zero if self.zero is None else torch.where(taken, other.zero, self.zero)
        column = torch.where(kept, new.column_scale, split)
        return replace(
            new, column_scale=column, group_scale=torch.where(kept[:, None], new.group_scale, parts), zero=zero
        )

    def with_scales(self, scale: Tensor, zero: Tensor | None, taken: Tensor) -> WeightGrid:
        """Return this grid with other scales and zero points ``[n, groups]`` where ``taken`` and the row holds them."""
        if self.zero is not None:
            taken = taken & zero.half().isfinite()
            zero = torch.where(taken, zero.half(), self.zero)
        if self.group_scale is None:
            return replace(self, column_scale=torch.where(taken[:, 0], scale[:, 0], self.column_scale), zero=zero)
        taken = taken & self._holds(scale)
        zero = zero if self.zero is None else torch.where(taken, zero, self.zero)
        return replace(self, group_scale=torch.where(taken, self._parts(scale).half(), self.group_scale), zero=zero)

    def storable(self, scale: Tensor) -> Tensor:
        """Return scales ``[n, groups]`` as the rows store them, float32."""
        if self.group_scale is None:
            return scale
        return self.column_scale[:, None] * self._parts(scale).half().float()

    def _parts(self, scale: Tensor) -> Tensor:
        column = self.column_scale[:, None]
        return scale / torch.where(column != 0, column, 1)

    def _holds(self, scale: Tensor) -> Tensor:
        """Return whether a row holds a scale beside its column scale, as a float16 of full precision."""
        parts = self._parts(scale)
        return (
            (self.column_scale[:, None] != 0) & ((parts == 0) | (parts.abs() >= _LEAST_HALF)) & parts.half().isfinite()
        )


class Channels:
    """The grid of a weight whose channels are rows ``[k, n]``.

    Args:
        steps: the grid by numbers ``[groups, n]``.
        group: the number of channels that share a scale.
    """

    def __init__(self, steps: Steps, group: int) -> None:
        self._steps, self._group = steps, group

    def at(self, channels: slice) -> Steps:
        """Return the grid of these channels."""
        return self._steps.changed(lambda values: self.spread(values, channels))

    def spread(self, of_groups: Tensor, channels: slice) -> Tensor:
        """Repeat values of groups ``[groups, n]`` for these channels."""
        return of_groups[torch.arange(channels.start, channels.stop) // self._group]


class Steps:
    """Rounding of numbers to a grid, each with a scale and a zero point of its own, of any one shape.

    Args:
        format: a name in ``_C.FORMATS``.
        scale, zero: float32; a float format has none.
    """

    def __init__(self, format: str, scale: Tensor | None = None, zero: Tensor | None = None) -> None:
        self.format, self.scale, self.zero = format, scale, zero
        self.kind = _C.FORMAT_FACTS[format]["kind"]
        if self.kind == "lookup":
            self.levels = levels_of(format)
            order = self.levels.nan_to_num(torch.inf).argsort(stable=True)[: int(self.levels.isfinite().sum())]
            rising = self.levels[order]
            self.order, self.middles = order.byte(), (rising[1:] + rising[:-1]) / 2

    def changed(self, of: Callable[[Tensor], Tensor]) -> Steps:
        """Return the same with ``of(scale)`` and ``of(zero)``: for numbers of another shape."""
        part = object.__new__(Steps)
        part.__dict__ = dict(self.__dict__)
        if self.scale is not None:
            part.scale, part.zero = of(self.scale), of(self.zero)
        return part

    def each(self) -> Iterator[Steps]:
        """Yield the grid of each row of the numbers; that of a float format again and again."""
        if self.scale is None:
            return itertools.repeat(self)
        return (self.changed(lambda values, i=i: values[i]) for i in range(len(self.scale)))

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest values."""
        if self.kind == "float":
            return values.to(getattr(torch, self.format))
        inside = values / torch.where(self.scale != 0, self.scale, 1)
        if self.kind == "lookup":
            return self.order[torch.searchsorted(self.middles, inside.contiguous())]
        return torch.round(inside + self.zero).clamp_(0, _C.FORMAT_FACTS[self.format]["code_max"]).byte()

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32."""
        if self.kind == "float":
            return codes.float()
        return self.scale * self.levels_of(codes)

    def levels_of(self, codes: Tensor) -> Tensor:
        """Return the values of codes by their scales."""
        return self.levels[codes.int()] if self.kind == "lookup" else codes - self.zero
