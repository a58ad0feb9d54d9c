# SPDX-License-Identifier: Apache-2.0
"""Rounding of a weight to a grid, one channel after another, each taking in what the others have lost.

Rows do not affect each other. The error e of a row is to be small in an `ErrorMetric`, sum of h e^2 + |e V|^2. It is
found by descent: each channel takes the code that is best while the others keep theirs. A pass takes n k q operations.

Channels are rows of the tensors in here, ``[k, n]``, so that one of them is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C
from lowbit.quant.error_metric import ErrorMetric
from lowbit.quant.weight_grid import Steps, WeightGrid

_TOGETHER = 32  # channels whose losses are followed one by one, before the sums over the directions are formed again
_NUMBERS = 1 << 24  # at a time: with fewer rows, a call of torch per channel costs more than its numbers
_PASSES = (0.25, 1.0)
"""The weight of the directions in each pass. With less of it, the codes move first that gain the most."""


def descended(grid: WeightGrid, wanted: Tensor, codes: Tensor, touched: Tensor, metric: ErrorMetric) -> Tensor:
    """Return codes ``[n, k]`` whose error is smaller in the metric.

    Args:
        grid: the values that codes mean.
        wanted: float32 ``[n, k]``.
        codes: where the descent begins; those of groups that are not touched stay, and so does one of two codes with the
            same value.
        touched: bool ``[n, groups]``.
        metric: the measure of errors.
    """
    step = max(1, _NUMBERS // grid.k)
    parts = (slice(begin, begin + step) for begin in range(0, len(codes), step))
    return torch.cat([_descended(grid.rows(rows), wanted[rows], codes[rows], touched[rows], metric) for rows in parts])


def _descended(grid: WeightGrid, wanted: Tensor, codes: Tensor, touched: Tensor, metric: ErrorMetric) -> Tensor:
    columns, codes, touched = wanted.T.contiguous(), codes.T.contiguous(), touched.T.contiguous()
    channels, directions, squares = grid.by_channels(), metric.directions, metric.squares[:, None]
    slices = [slice(begin, min(begin + _TOGETHER, len(columns))) for begin in range(0, len(columns), _TOGETHER)]
    values = torch.cat([channels.at(at).decode(codes[at]) for at in slices])
    sums = directions.T @ (values - columns)  # [q, n]
    for weight in _PASSES:
        for at in slices:
            own = directions[at]
            products = weight * (own @ own.T)
            square = products.diagonal()[:, None]
            whole = squares[at] + square
            target = columns[at] - (weight * (own @ sums) - square * (values[at] - columns[at])) / whole
            steps, moves = channels.at(at), channels.spread(touched, at)
            codes[at], back = _rounded(steps, target, values[at], products / whole.T, codes[at], moves)
            values[at] -= back
            sums -= own.T @ back
    return codes.T.contiguous()


def _rounded(
    steps: Steps, target: Tensor, origin: Tensor, coupling: Tensor, held: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor]:
    """Round channels ``[m, n]`` in their order, and return codes and losses, which are origin - value.

    Args:
        steps: the grid of these channels.
        target: what is to be rounded, before losses of the channels in front.
        origin: what losses are counted from.
        coupling: ``[m, m]``, of which the upper triangle says how much of a loss each later target takes in.
        held: the codes that stay where ``moves`` is false or another code has the same value.
    """
    losses = torch.empty_like(target)
    if steps.kind == "integer":
        moves = moves & (steps.scale != 0)
        inverse = torch.where(moves, 1 / steps.scale, 0)
        places = torch.where(moves, target * inverse + steps.zero, held.float())
        shifted, most = torch.addcmul(origin, steps.scale, steps.zero), _C.FORMAT_FACTS[steps.format]["code_max"]
        for i, code in enumerate(places):
            if i:
                code.addcmul_(coupling[:i, i] @ losses[:i], inverse[i])
            code.round_().clamp_(0, most)
            torch.addcmul(shifted[i], steps.scale[i], code, value=-1, out=losses[i])
        return places.byte(), losses
    codes, old = held.clone(), steps.decode(held)
    for i, one in zip(range(len(target)), steps.each(), strict=False):
        code = one.nearest(target[i] + coupling[:i, i] @ losses[:i])
        value = one.decode(code)
        moved = moves[i] & (value != old[i])
        codes[i] = torch.where(moved, code, codes[i])
        losses[i] = origin[i] - torch.where(moved, value, old[i])
    return codes, losses
