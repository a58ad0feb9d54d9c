# SPDX-License-Identifier: Apache-2.0
"""HQQ (Badri and Shaji, half-quadratic quantization, 2023): zero points that make the error of a group sparse.

|w - s (q - z)|^p with p < 1 is minimized over real z, where the scale s follows from the group's range. A sparse error
e is introduced, and each iteration computes
    e = shrink(w - s (q - z));    z = mean(q - (w - e) / s);    penalty *= kappa
where shrink(d) = sign(d) max(0, |d| - |d|^(p - 1) / penalty).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.algorithms import HQQ
from lowbit.quant.codes import SMALLEST, split_scale

FAR = 64  # a range further from 0 than 64 times its span is extended to 0: float16 resolves zero points up to 2048


def hqq(weight: Tensor, group_size: int, code_max: int, options: HQQ) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 ``[n, k]``, with their scales and real-valued zero points ``[n, groups]``.

    Args:
        weight: float32 ``[n, k]``.
        group_size: the group size of the scales; 0 is one group.
        code_max: the max code.
        options: iterations and penalty.
    """
    n, k = weight.shape
    w = _grouped(weight, group_size)
    inside = _grouped(weight.new_ones(1, k), group_size)
    count = inside.sum(2)
    low, high = torch.where(inside > 0, w, torch.inf).amin(2), torch.where(inside > 0, w, -torch.inf).amax(2)
    far = torch.maximum(low, -high) > FAR * (high - low)
    low, high = torch.where(far, low.clamp(max=0), low), torch.where(far, high.clamp(min=0), high)
    ideal = high / code_max - low / code_max
    column, half = split_scale(torch.where(ideal >= SMALLEST, ideal, 0), group_size)
    scale = column[:, None] if half is None else column[:, None] * half.float()
    s = torch.where(scale != 0, scale, 1)[:, :, None]
    z = (-low / s[:, :, 0]).half().float()
    best_zero, best = z, torch.zeros_like(w)
    least, penalty = torch.full_like(z, torch.inf), options.beta
    for _ in range(options.iterations):
        codes = torch.round(w / s + z[:, :, None]).clamp(0, code_max)
        error = w - s * (codes - z[:, :, None])
        size = (error.abs() * inside).sum(2)
        better = size < least
        best, best_zero = torch.where(better[:, :, None], codes, best), torch.where(better, z, best_zero)
        least = torch.where(better, size, least)
        if not better.any():
            break
        small = error.abs().clamp(min=1e-12)
        sparse = error.sign() * (small - small.pow(options.p - 1) / penalty).clamp(min=0)
        moved = ((codes - (w - sparse) / s) * inside).sum(2) / count
        z, penalty = moved.half().float(), penalty * options.kappa
    return best.byte().flatten(1)[:, :k].contiguous(), scale, best_zero


def _grouped(values: Tensor, group_size: int) -> Tensor:
    """Return values ``[n, k]`` as ``[n, groups, group_size]``, padded with zeros."""
    size = group_size or values.shape[1]
    return torch.nn.functional.pad(values, (0, -values.shape[1] % size)).unflatten(1, (-1, size))
