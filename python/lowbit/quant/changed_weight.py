# SPDX-License-Identifier: Apache-2.0
"""Quantize a packed weight again that has changed a little, so that little of the change is lost.

The weight W was on the grid of its codes; W + D is not. Rounded to nearest, a D of less than half a step is lost, and
with new scales the error of rounding, which W has already, comes once more. So

- a group that D does not touch keeps its codes and its scale bit for bit;
- any other group keeps its codes where they are still the nearest, and its scale, unless a new one has the smaller
  error;
- then scales and zero points are fitted to what is still missing of D (scale_fit.py), which they take in although it is
  far below a step. A format without scales, or with one for a whole row, takes other codes instead
  (rounding_in_order.py). Both make the error small in an `ErrorMetric`: that of the inputs, where a calibration knows
  them, or else that of the inputs for which D was learned.

Of a D so small that nothing of a row can take it in, nothing is kept; the result says in how many rows that is so.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.spec import StoredWeight
from lowbit.quant.error_metric import ErrorMetric
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.layout import repack_weight
from lowbit.quant.packing import check_finite, pack_weight
from lowbit.quant.report import decibel
from lowbit.quant.rounding_in_order import descended
from lowbit.quant.scale_fit import fitted
from lowbit.quant.weight_grid import WeightGrid

NOTHING = 2.0**-20
"""A change below this part of the largest number of its group is none: float32 has 2^-24, and DoRA at its start, or a
rotation by nothing, computes with several roundings."""
LIGHT, MOST = 1 / 32, 0.75
"""A change whose root mean square is below this part of a step moves no code, if scales and zero points alone take in so
much of it: codes would move for a few percent more, and that takes as long as all the rest."""
_NUMBERS = 1 << 20  # at a time, so that copies of them stay in a cache


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a change D of a weight W, whose codes now mean P: sums of squares and products.

    Args:
        weight: sum of (W + D)^2.
        wanted: sum of D^2.
        product: sum of (P - W) D.
        noise: sum of (P - W - D)^2.
        rows: the number of rows that D touches.
        unmoved: the number of those in which no code has changed.
    """

    weight: float = 0.0
    wanted: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    rows: int = 0
    unmoved: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(*map(operator.add, astuple(self), astuple(other)))

    @property
    def kept(self) -> float:
        """The share of the change that is kept: the part of P - W along D, by the size of D; 1 is all of it."""
        return self.product / self.wanted if self.wanted else 1.0

    @property
    def change_db(self) -> float:
        """10 log10 of the size of the change by that of the weight; -inf is no change."""
        return -decibel(self.weight, self.wanted)

    @property
    def error_db(self) -> float:
        """10 log10 of the size of the weight by that of the error."""
        return decibel(self.weight, self.noise)


@torch.no_grad()
def requantize(
    packed: nn.Parameter, stored: StoredWeight, wanted: Tensor, inputs: InputMoments | None = None
) -> nn.Parameter:
    """Return the packed weight for changed values, in the same format and layout; ``packed`` itself, if none changed.

    Args:
        packed: the weight as it is, of one matrix.
        stored: its format, size and layout.
        wanted: float32 ``[n, k]``, finite: the weight as it should be.
        inputs: the input moments of the layer, with products; None takes the change to tell of them.

    Raises:
        ValueError: the weight is 2:4 and has changed, or the dtype of a float format does not hold a value.
    """
    parts = _parts(packed, stored, wanted)
    if not any(part.touched.any() for part in parts):
        return packed
    if stored.spec.format == SEMI_SPARSE:
        raise ValueError(
            "merge: a weight must be dense to take an adapter, got a 2:4 weight; call lowbit.dequantize_(model) before"
        )
    grids, made = zip(*(part.nearest(inputs) for part in parts), strict=True)
    touched = torch.cat([part.touched for part in parts])
    grid, codes = _towards(WeightGrid.joined(grids), torch.cat(made), touched, parts, inputs)
    if stored.spec.is_float:
        check_finite("merge", f"weight with the adapter in {stored.spec.format}", codes)
    weight = grid.pack(codes, stored.layout)
    return nn.Parameter(weight.to(packed.device), requires_grad=False)


@torch.no_grad()
def quantize_anew(
    packed: Tensor, stored: StoredWeight, wanted: Tensor, new: StoredWeight, inputs: InputMoments | None = None
) -> nn.Parameter:
    """Return the weight packed in another format, which keeps the change too; the other arguments are those of
    `requantize`. The weight must have changed."""
    first, _ = pack_weight(wanted, new.spec, None if new.spec.takes_absmax else inputs)
    grid, codes = WeightGrid.of(first.data.cpu(), new.in_layout(_C.LAYOUT))
    everything = torch.ones(stored.n, -(-grid.k // grid.group), dtype=torch.bool, device="cpu")
    grid, codes = _towards(grid, codes, everything, _parts(packed, stored, wanted), inputs)
    return nn.Parameter(grid.pack(codes, new.layout).to(packed.device), requires_grad=False)


@torch.no_grad()
def change_between(
    packed: Tensor,
    stored: StoredWeight,
    after: Tensor,
    new: StoredWeight,
    wanted: Tensor,
    inputs: InputMoments | None = None,
) -> Change:
    """Return what a packed weight ``after``, stored as ``new``, has kept of the change from another to ``wanted``; with
    the moments of inputs, by the size of the products with them."""
    parts, values, change = _parts(packed, stored, wanted), _decoded(after, new), Change()
    touched = [part.moving for part in parts if part.touched.any()]
    metric = None if inputs is None or not touched else ErrorMetric.of(touched, inputs)
    for part, rows in zip(parts, _slices(stored), strict=True):
        change += part.change(values[rows], metric)
    return change


def _decoded(packed: Tensor, stored: StoredWeight) -> Tensor:
    packed = repack_weight(packed.detach().cpu(), stored)
    return torch.ops.lowbit.dequantize(packed, *stored.spec.weight_args(stored.n, stored.k)).float()


def _parts(packed: Tensor, stored: StoredWeight, wanted: Tensor) -> list[_Rows]:
    grid, codes = WeightGrid.of(packed.detach().cpu(), stored)
    before, wanted = _decoded(packed, stored), wanted.cpu()
    return [_Rows(grid.rows(rows), codes[rows], before[rows], wanted[rows]) for rows in _slices(stored)]


def _slices(stored: StoredWeight) -> list[slice]:
    step = max(1, _NUMBERS // stored.k)
    return [slice(begin, begin + step) for begin in range(0, stored.n, step)]


def _towards(
    grid: WeightGrid, codes: Tensor, touched: Tensor, parts: list[_Rows], inputs: InputMoments | None
) -> tuple[WeightGrid, Tensor]:
    """Return a grid and codes that keep more of the change than these nearest codes."""
    wanted, changes = torch.cat([part.wanted for part in parts]), [part.moving for part in parts]
    metric, scaled = ErrorMetric.of(changes, inputs), not grid.spec.is_float
    if scaled:
        grid = fitted(grid, codes, wanted, touched, metric)
    if scaled and _size(changes) < LIGHT * _size([grid.step]) and _kept(grid, codes, parts, metric) >= MOST:
        return grid, codes
    codes = descended(grid, wanted, codes, touched, metric)
    return fitted(grid, codes, wanted, touched, metric) if scaled else grid, codes


def _kept(grid: WeightGrid, codes: Tensor, parts: list[_Rows], metric: ErrorMetric) -> float:
    """Return the share of the change that is kept, in the metric."""
    change, begin = Change(), 0
    for part in parts:
        rows = slice(begin, begin := begin + len(part.wanted))
        change += part.change(grid.rows(rows).decode(codes[rows]), metric)
    return change.kept


def _size(values: list[Tensor]) -> float:
    """Return the root mean square of all."""
    largest = max(float(one.abs().max()) for one in values) or 1.0
    squares = sum(float((one / largest).square_().sum()) for one in values)
    return largest * (squares / sum(one.numel() for one in values)) ** 0.5


class _Rows:
    """Rows of a weight: their codes, and the values that they should have."""

    def __init__(self, grid: WeightGrid, codes: Tensor, before: Tensor, wanted: Tensor) -> None:
        self.grid, self.codes, self.before, self.wanted = grid, codes, before, wanted
        self.moving = wanted - self.before  # the change, zero in groups that it does not touch: D [n, k]
        self.largest = torch.maximum(self._largest(self.before), self._largest(wanted))  # [n, groups]
        self.touched = self._largest(self.moving) > NOTHING * self.largest
        if not self.touched.all():
            self.moving = grid.apart(grid.grouped(self.moving) * self.touched[..., None])
            self.wanted = self.before + self.moving

    def _largest(self, values: Tensor) -> Tensor:
        """Return the largest size of each group ``[n, groups]``."""
        low, high = self.grid.grouped(values).aminmax(dim=2)
        return torch.maximum(-low, high)

    def nearest(self, inputs: InputMoments | None) -> tuple[WeightGrid, Tensor]:
        """Return the grid with the smaller error by group, and the nearest codes."""
        grid, (codes, error) = self.grid, self._nearest(self.grid, inputs)
        if not grid.spec.is_float:
            other = grid.chosen_for(self.wanted, inputs)
            new, error_of_other = self._nearest(other, inputs)
            taken = self.touched & (error_of_other < error)
            grid = grid.with_groups(other, taken)
            codes = grid.apart(torch.where(taken[..., None], grid.grouped(new), grid.grouped(codes)))
        return grid, grid.apart(torch.where(self.touched[..., None], grid.grouped(codes), grid.grouped(self.codes)))

    def _nearest(self, grid: WeightGrid, inputs: InputMoments | None) -> tuple[Tensor, Tensor]:
        """Return the nearest codes, and the square of the error of each group ``[n, groups]`` by its largest number."""
        steps, wanted = grid.steps(), grid.grouped(self.wanted)
        codes = steps.nearest(wanted)
        error = (steps.decode(codes) - wanted).div_(self.largest[..., None]).square_()  # float32 has no square of 1e30
        if inputs is not None:
            error *= grid.grouped(inputs.importance[None])
        return grid.apart(codes), error.sum(2)

    def change(self, after: Tensor, metric: ErrorMetric | None) -> Change:
        """Return what was kept, for the values ``[n, k]`` of the result."""
        unit = float(torch.maximum(self.wanted.abs().max(), self.before.abs().max())) or 1.0  # float32 has no 1e60
        wanted, change, moved = self.wanted / unit, self.moving / unit, (after - self.before) / unit
        pairs = ((wanted, wanted), (change, change), (moved, change), (moved - change,) * 2)
        of_rows = torch.linalg.vecdot if metric is None else metric.products
        sums = [unit**2 * float(of_rows(a, b).double().sum()) for a, b in pairs]
        rows = self.touched.any(1)
        return Change(*sums, int(rows.sum()), int((rows & ~(moved != 0).any(1)).sum()))
