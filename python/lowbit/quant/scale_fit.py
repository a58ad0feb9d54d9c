# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points by which a packed weight takes in a change that is far below a step of its codes.

A code moves by whole steps, and a light adapter changes a weight by a hundredth of one. A code that moves for it is an
error a hundred times larger, and where an adapter asks for that most, inputs are largest: of 21 layers of SmolLM2 the
products then err by 3.6 to 14 times the change in squares, and by 0.6 to 1.1 where scales take it in. A scale moves by 2^-11 of
itself. One scale and one zero point per group of 32 are 256 numbers per row of 4096, enough to keep the product with
tens of directions of inputs. They are found by least squares in an `ErrorMetric`: with e the error of a row and B a, a
change of its values by a change a of these numbers,

    (B^T (diag(h) + V V^T) B) a = -B^T (diag(h) + V V^T) e.

Columns of B do not overlap but for the two of one group, which are made orthogonal. So B^T diag(h) B is diagonal, and
the system is solved by Woodbury's formula, with a matrix ``[q, q]`` per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.quant.error_metric import ErrorMetric
from lowbit.quant.weight_grid import WeightGrid

_FACTOR = 2.0  # by which a scale changes at most
_NUMBERS = 1 << 19  # at a time, so that a few copies of them stay in the cache


def fitted(grid: WeightGrid, codes: Tensor, wanted: Tensor, touched: Tensor, metric: ErrorMetric) -> WeightGrid:
    """Return the grid with scales and zero points that are fitted to the codes, in rows whose error gets smaller.

    Args:
        grid: what the codes mean now; of no float format.
        codes: uint8 ``[n, k]``.
        wanted: float32 ``[n, k]``.
        touched: bool ``[n, groups]``; the others keep their scales.
        metric: the measure of errors.
    """
    step = max(1, _NUMBERS // grid.k)
    parts = (slice(begin, begin + step) for begin in range(0, len(codes), step))
    return WeightGrid.joined(
        [_fitted(grid.rows(rows), codes[rows], wanted[rows], touched[rows], metric) for rows in parts]
    )


def _fitted(grid: WeightGrid, codes: Tensor, wanted: Tensor, touched: Tensor, metric: ErrorMetric) -> WeightGrid:
    before = grid.decode(codes) - wanted
    scale, zero = _least_squares(grid, codes, before, touched, metric)
    moved = scale / torch.where(grid.scale != 0, grid.scale, 1)
    taken = touched & (moved > 1 / _FACTOR) & (moved < _FACTOR)
    new = grid.with_scales(scale, zero, taken)
    after = new.decode(codes) - wanted
    smaller = metric.products(after, after) < metric.products(before, before)
    return new if smaller.all() else grid.with_scales(scale, zero, taken & smaller[:, None])


def _least_squares(
    grid: WeightGrid, codes: Tensor, error: Tensor, touched: Tensor, metric: ErrorMetric
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points ``[n, groups]``; a symmetric format has no zero points."""
    scale, levels = grid.scale, grid.levels(codes)  # levels [n, groups, group]: values are scale * levels
    h = grid.grouped(metric.squares[None])  # [1, groups, group]
    directions = torch.nn.functional.pad(metric.directions.T, (0, levels.shape[1] * levels.shape[2] - grid.k))
    directions = directions.unflatten(1, levels.shape[1:]).permute(1, 2, 0)  # [groups, group, q]
    error_of_groups = grid.grouped(error)
    mean = 0.0
    if grid.zero is not None:
        mean = (levels * h).sum(2) / h.sum(2)
        levels = levels - mean[..., None]
    squares = [(levels.square() * h).sum(2)]
    products = [(levels * h * error_of_groups).sum(2)]
    read = [torch.bmm(levels.transpose(0, 1), directions).transpose(0, 1)]  # [n, groups, q]
    if grid.zero is not None:
        squares.append(h.sum(2).expand_as(scale))
        products.append((h * error_of_groups).sum(2))
        read.append(directions.sum(1).expand_as(read[0]))
    inverse = [torch.where(touched & (one > 0), one.rsqrt(), 0) for one in squares]
    inverse = torch.cat(inverse, 1)[..., None]
    read = torch.cat(read, 1).mul_(inverse)  # [n, unknowns, q]
    right = torch.cat(products, 1)[..., None].mul_(inverse)
    right += read @ (error @ metric.directions)[..., None]
    inner = read.mT @ read
    inner.diagonal(dim1=1, dim2=2).add_(1)
    found = (read @ torch.linalg.solve(inner, read.mT @ right) - right).mul_(inverse)[..., 0]
    of_scale = found[:, : scale.shape[1]]
    if grid.zero is None:
        return scale + of_scale, None
    new = grid.storable(scale + of_scale)
    of_mean = scale * mean + found[:, scale.shape[1] :]  # what a code of the mean means now
    return new, grid.zero_point + mean - of_mean / torch.where(new != 0, new, 1)
