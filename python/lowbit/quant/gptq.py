# SPDX-License-Identifier: Apache-2.0
"""GPTQ (Frantar et al., arXiv 2210.17323): codes that minimize the error of the layer's output, not of its weight.

Input channels are rounded one after the other. The error of one, divided by its diagonal entry of U (the Cholesky
factor of the inverse of H, the mean of x x^T), is spread over the channels that follow by U's row:
    e = (w_i - decoded_i) / U[i, i];    w_j -= e U[i, j]  for j > i
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.formats.algorithms import GPTQ

BLOCK = 128  # channels between two products of matrices; without act_order one group of the weight, if it has groups

Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Scales and zero points ``[n, groups]`` of a weight ``[n, k]``, whose errors at each k are weighted
by an importance."""


def gptq(
    weight: Tensor, hessian: Tensor, group_size: int, code_max: int, options: GPTQ, scales: Scales
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 ``[n, k]``, and the scales and zero points ``[n, groups]`` that they go with.

    Args:
        weight: float32 ``[n, k]``; not changed.
        hessian: float32 ``[k, k]``, mean of x x^T.
        group_size: the group size of the scales; 0: one group.
        code_max: the largest code.
        options: order and damping.
        scales: the way that they are chosen.
    """
    n, k = weight.shape
    importance = hessian.diagonal().clone()
    size = group_size or k
    in_order = not options.act_order and size <= BLOCK
    order = torch.arange(k, device=weight.device)
    if options.act_order:
        order = importance.argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order], options.damping)
    left = weight.T[order]  # [k, n], not rounded yet
    scale, zero = scales(weight, importance)
    codes = weight.new_empty(k, n, dtype=torch.uint8)
    block = size if in_order else BLOCK
    for begin in range(0, k, block):
        end = min(begin + block, k)
        group = order[begin:end] // size
        if in_order:  # the channels before have changed this group
            at = slice(begin // size, begin // size + 1)
            scale[:, at], zero[:, at] = scales(left[begin:end].T.contiguous(), importance[begin:end])
        codes[order[begin:end]], errors = _round_block(
            left[begin:end], scale.T[group], zero.T[group], factor[begin:end, begin:end], code_max
        )
        left[end:] -= factor[begin:end, end:].T @ errors
    return codes.T.contiguous(), scale, zero


def _round_block(
    left: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, code_max: int
) -> tuple[Tensor, Tensor]:
    """Round the channels of a block, ``[block, n]`` like their scales and zero points; return codes and errors."""
    codes, errors = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left)
    divisor = torch.where(scale != 0, scale, 1)
    for i in range(len(left)):
        code = torch.round(left[i] / divisor[i] + zero[i]).clamp_(0, code_max)
        codes[i] = code.byte()
        errors[i] = (left[i] - scale[i] * (code - zero[i])) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


def _factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse, float32; computed in float64, damped until there is one."""
    matrix = hessian.double()
    diagonal = matrix.diagonal()
    diagonal[diagonal == 0] = 1.0  # a channel that was always 0
    mean = diagonal.mean()
    for power in range(4):
        diagonal += mean * damping * 10.0**power
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            return torch.linalg.cholesky(inverse, upper=True).float()
    raise ValueError("GPTQ: the second moments of a layer's inputs have no Cholesky factor; give a larger damping")
