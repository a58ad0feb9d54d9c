# SPDX-License-Identifier: Apache-2.0
"""GPTQ (Frantar et al., arXiv 2210.17323): codes that minimize the error of the layer's output, not of its weight.

Let H = R R^T be the mean of x x^T with an upper triangular R. The mean square of the output's error e x is |e R|^2, and
column j of e R depends on the errors of the channels up to j alone. So the channels are rounded in this order, each to
the code that makes its column smallest, given the errors of those before it:
    target_j = w_j + sum over i < j of e_i R[i, j] / R[j, j];    e_j = w_j - decoded_j
This is GPTQ without the inverse of H: a Cholesky factor, and one matrix product per block of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.algorithms import GPTQ

BLOCK = 128  # channels between two matrix products; without act_order, a block is one group of the weight, if it fits

Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of a weight ``[n, k]`` and an importance ``[k]``, which weights the errors, that returns scales and zero
points ``[n, groups]``."""


@dataclass(frozen=True, slots=True)
class Factor:
    """The factor R of a hessian, for all weights that multiply the same inputs.

    Args:
        order: int64 ``[k]``, the channels in the order in which they are rounded.
        unit: float32 ``[k, k]``, R with each column divided by its diagonal entry; upper triangular.
        squares: float64 ``[k]``, the squared diagonal of R.
        added: what damping added to the diagonal of the hessian.
        importance: float32 ``[k]``, the diagonal of the hessian, in the order of the weight.
    """

    order: Tensor
    unit: Tensor
    squares: Tensor
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
        last_first = order.flip(0)
        mean = float(importance.double().mean()) or 1.0  # 0: the inputs were always 0
        # The lower factor of this matrix, whose diagonal has a mean of 1, is R in reverse order.
        matrix = hessian[last_first][:, last_first].div_(mean)
        added = options.damping
        while True:
            lower, failed = torch.linalg.cholesky_ex(matrix.diagonal_scatter(matrix.diagonal() + added))
            if not failed and lower.diagonal().isfinite().all():
                break
            added *= 10
        factor = lower.flip(0, 1)
        diagonal = factor.diagonal().clone()
        return cls(order, factor.div_(diagonal), diagonal.double().square() * mean, added * mean, importance)

    def loss(self, matrix: Tensor) -> float:
        """Return the sum over the rows e of ``matrix`` ``[n, k]`` of e H e^T."""
        left, total = matrix.T[self.order], 0.0
        for begin in range(0, len(left), BLOCK):
            end = begin + BLOCK  # the factor is 0 below
            sums = self.unit[:end, begin:end].T @ left[:end]
            total += float(sums.square_().sum(1).double() @ self.squares[begin:end])
        return max(total - self.added * float(left.square().sum(dtype=torch.float64)), 0.0)


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
    columns = weight.T[factor.order]  # [k, n]
    scale, zero = scales(weight, factor.importance)
    codes, errors = weight.new_empty(k, n, dtype=torch.uint8), torch.empty_like(columns)
    block = size if in_order else BLOCK
    for begin in range(0, k, block):
        at = slice(begin, min(begin + block, k))
        sums = factor.unit[:begin, at].T @ errors[:begin]
        group = factor.order[at] // size
        if in_order:  # the errors of earlier channels have changed this group, so it gets new scales
            one = slice(begin // size, begin // size + 1)
            scale[:, one], zero[:, one] = scales((columns[at] + sums).T.contiguous(), factor.importance[at])
        found = _round_block(
            columns[at], sums, scale.T[group], zero.T[group], factor.unit[at, at], code_max, errors[at]
        )
        codes[factor.order[at]] = found
    return codes.T.contiguous(), scale, zero


def _round_block(
    weight: Tensor, sums: Tensor, scale: Tensor, zero: Tensor, unit: Tensor, code_max: int, errors: Tensor
) -> Tensor:
    """Round the channels of a block ``[block, n]`` and return their codes; write their errors to ``errors``.

    Args:
        weight: the channels.
        sums: what the errors of earlier blocks add to their targets.
        scale, zero: scales and zero points ``[block, n]``.
        unit: the block of the factor.
        code_max: the max code.
        errors: receives weight - decoded.
    """
    divisor = torch.where(scale != 0, scale, 1)
    codes = (weight + sums).div_(divisor).add_(zero)  # in units of codes
    shifted = torch.addcmul(weight, scale, zero)
    for i in range(len(weight)):
        code = codes[i]
        if i:
            code.addcdiv_(unit[:i, i] @ errors[:i], divisor[i])
        code.round_().clamp_(0, code_max)
        torch.addcmul(shifted[i], scale[i], code, value=-1, out=errors[i])
    return codes.byte()
