# SPDX-License-Identifier: Apache-2.0
"""GPTQ (Frantar et al., arXiv 2210.17323): codes that minimize the error of the layer's output, not of its weight.

Let H = U^T U be the sum of x x^T, with an upper triangular U. The sum of squares of the output's error e x is |U e|^2,
and row j of U e depends on the errors of the channels from j on alone. So the channels are rounded from the last to the
first, each to the code that makes its row smallest, given the errors of those behind it:
    target_j = w_j + sum over i > j of e_i U[j, i] / U[j, j];    e_j = w_j - decoded_j
This is GPTQ without the inverse of H: a Cholesky factor, and matrix products of blocks of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lowbit.formats.algorithms import GPTQ

BLOCK = 128
"""Channels that are rounded together. Without act_order, a block is one group of the weight, if it fits."""
STEP = 16
"""Channels that are rounded one by one. Between them, the halves of a block meet in matrix products."""
PANEL = 512
"""Rows of the Cholesky factor between two matrix products."""

Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of a weight ``[n, k]`` and an importance ``[k]``, which weights the errors, that returns scales and zero
points ``[n, groups]``."""


@dataclass(frozen=True, slots=True)
class Factor:
    """The factor U of a hessian, for all weights that multiply the same inputs.

    Args:
        order: int64 ``[k]``, the channels from the one that is rounded last to the one that is rounded first.
        upper: float32 ``[k, k]``, U. What lies below the diagonal is undefined.
        added: what damping added to the diagonal of the hessian.
        importance: float32 ``[k]``, the diagonal of the hessian, in the order of the weight.
    """

    order: Tensor
    upper: Tensor
    added: float
    importance: Tensor

    @classmethod
    def of(cls, hessian: Tensor, options: GPTQ) -> Factor:
        """Return the factor of a finite hessian, float32 ``[k, k]``.

        Damping grows tenfold until the factor exists. It always does in the end: the hessian is then nearly a multiple
        of the identity.
        """
        importance = hessian.diagonal().clone()
        order = torch.arange(len(importance), device=hessian.device)
        if options.act_order:
            order = importance.argsort(descending=True, stable=True)
        order = order.flip(0)
        mean = float(importance.double().mean()) or 1.0  # 0: the inputs were always 0
        added = options.damping
        while (upper := _cholesky(hessian, order, mean, added)) is None:
            added *= 10
        return cls(order, upper.mul_(mean**0.5), added * mean, importance)

    def loss(self, matrix: Tensor) -> Tensor:
        """Return e H e^T for each row e of ``matrix`` ``[n, k]``, float64 ``[n]``."""
        left = matrix.T[self.order]
        total = left.square().sum(0, dtype=torch.float64).mul_(-self.added)
        for begin in range(0, len(left), PANEL):
            rows = self.upper[begin : begin + PANEL, begin:].triu()
            total += (rows @ left[begin:]).square_().sum(0, dtype=torch.float64)
        return total.clamp_(min=0)


def _cholesky(hessian: Tensor, order: Tensor, mean: float, added: float) -> Tensor | None:
    """Return the upper factor of ``hessian[order][:, order] / mean + added * I``, or None if there is none.

    Only the upper triangle is computed, in panels of rows, as nearly all operations are those of matrix products then.
    torch.linalg.cholesky transposes the matrix twice, which takes longer than its products.
    """
    upper = torch.empty_like(hessian)
    for begin in range(0, len(order), PANEL):
        at = order[begin : begin + PANEL]
        end = begin + len(at)
        panel = hessian[at].index_select(1, order[begin:]).div_(mean)
        panel.diagonal().add_(added)
        panel.addmm_(upper[:begin, begin:end].T, upper[:begin, begin:], alpha=-1)
        corner, failed = torch.linalg.cholesky_ex(panel[:, : len(at)], upper=True)
        if failed or not corner.diagonal().isfinite().all():
            return None
        upper[begin:end, begin:end] = corner
        rest = panel[:, len(at) :].T  # a factor on the right keeps the order of bytes
        upper[begin:end, end:] = torch.linalg.solve_triangular(corner, rest, upper=True, left=False).T
    return upper


def gptq(
    weight: Tensor, factor: Factor, group_size: int, code_max: int, act_order: bool, scales: Scales
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 ``[n, k]``, with their scales and zero points ``[n, groups]``.

    Args:
        weight: float32 ``[n, k]``; not changed. Rows do not affect each other.
        factor: that of the inputs.
        group_size: the group size of the scales; 0 is one group.
        code_max: the max code.
        act_order: whether the factor has the channels in the order of their inputs. Groups are consecutive channels of
            the weight nevertheless, with scales that are chosen before the first channel is rounded.
        scales: the function that chooses scales and zero points.
    """
    n, k = weight.shape
    size = group_size or k
    in_order = not act_order and size <= BLOCK
    rows = weight.T.contiguous().index_select(0, factor.order)  # rows are gathered much faster than columns
    grid = _grid(*scales(weight, factor.importance))
    codes = weight.new_empty(k, n, dtype=torch.uint8)
    errors = weight.new_zeros(k, n)  # before a channel is rounded, what the errors behind it add to its target
    block = size if in_order else BLOCK
    diagonal = factor.upper.diagonal()[:, None]

    def round_from(begin: int, end: int) -> None:
        if end - begin > block:  # halves: large matrix products take a third of the time of one of 32 rows per group
            middle = end - ceil((end - begin) / (2 * block)) * block
            round_from(middle, end)
            errors[begin:middle].addmm_(factor.upper[begin:middle, middle:end], errors[middle:end])
            return round_from(begin, middle)
        at = slice(begin, end)
        columns, sums = rows[at], errors[at] / diagonal[at]
        if in_order:  # the errors of earlier channels have changed this group, so it gets new scales
            first = k - end
            one = slice(first // size, first // size + 1)
            part = (columns + sums).flip(0).T.contiguous()
            for values, found in zip(grid, _grid(*scales(part, factor.importance[first : first + block])), strict=True):
                values[one] = found
            spread = [values[one].expand(end - begin, n) for values in grid]
        else:
            spread = [values.index_select(0, factor.order[at] // size) for values in grid]
        unit = factor.upper[at, at] / diagonal[at]
        codes[factor.order[at]] = _round_block(columns, sums, *spread, unit, code_max, errors[at])

    round_from(0, k)
    return codes.T.contiguous(), grid[0].T.contiguous(), grid[2].T.contiguous()


def _grid(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, their inverses (1 for a scale of 0) and zero points ``[groups, n]``."""
    scale = scale.T.contiguous()
    return scale, torch.where(scale != 0, scale, 1).reciprocal_(), zero.T.contiguous()


def _round_block(
    weight: Tensor,
    sums: Tensor,
    scale: Tensor,
    inverse: Tensor,
    zero: Tensor,
    unit: Tensor,
    code_max: int,
    errors: Tensor,
) -> Tensor:
    """Round the channels of a block ``[block, n]``, from the last on, and return their codes; write their errors to
    ``errors``.

    Args:
        weight: the channels.
        sums: what the errors of earlier blocks add to their targets; changed.
        scale, inverse, zero: scales, their inverses and zero points ``[block, n]``.
        unit: the block of the factor, with ones on the diagonal.
        code_max: the max code.
        errors: receives weight - decoded.
    """
    codes = torch.addcmul(zero, sums.add_(weight), inverse)  # in units of codes
    shifted = torch.addcmul(weight, scale, zero)

    def round_from(begin: int, end: int) -> None:
        middle = (begin + end) // 2
        if end - begin > STEP:
            round_from(middle, end)
            codes[begin:middle].addcmul_(unit[begin:middle, middle:end] @ errors[middle:end], inverse[begin:middle])
            round_from(begin, middle)
            return
        for i in range(end - 1, begin - 1, -1):
            code = codes[i]
            if i + 1 < end:
                code.addcmul_(errors[i + 1 : end].T.mv(unit[i, i + 1 : end]), inverse[i])
            code.round_().clamp_(0, code_max)
            torch.addcmul(shifted[i], scale[i], code, value=-1, out=errors[i])

    round_from(0, len(weight))
    return codes.byte()
