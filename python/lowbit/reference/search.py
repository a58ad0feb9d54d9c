# SPDX-License-Identifier: Apache-2.0
"""The search for scales: of many candidates for each group, take the one with the smallest sum of importance * (w -
decoded)^2, and none that is worse than the scale of the group's range (csrc/formats/scale_search.hpp, in float64).

With a scale u, the codes of a group represent levels l around the zero point. The best scale for those levels is ``t =
sum h w l / sum h l^2``, with the error ``sum h w^2 - (sum h w l)^2 / sum h l^2``. The candidate with the largest ``(sum
h w l)^2 / sum h l^2`` wins. Its t is rounded for storage, and its levels give one more candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.quantize import QuantizedWeight, bits_of, quantize

SYMMETRIC_STEPS = (0.5, 0.625, 0.6875, 0.75, 0.8125, 0.875, 0.9375, 1, 1.0625, 1.125, 1.25, 1.375, 1.5, 1.75)
ASYMMETRIC_STEPS = tuple(i / 15 for i in (12, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 20, 22, 25))
"""The number of steps on the larger side of a group's range, as a fraction of those that the codes have."""
MARGIN = 1 + 2.0**-16
REFITS = 1


def search(
    weight: Tensor, format: str, group_size: int, mapping: str, importance: Tensor | None = None
) -> QuantizedWeight:
    """Quantize weights ``[n, k]`` of an integer format with searched scales, and zero points if asymmetric.

    Args:
        weight, format, group_size, mapping: the arguments of `quantize`; not ``symmetric_no_clipping_err``.
        importance: ``[k]``, the weight of a squared error; None means equal weights.
    """
    start = quantize(weight, format, group_size, mapping)
    most, asymmetric = 2 ** bits_of(format) - 1, mapping == "asymmetric"
    column = start.column_scale.double()[:, None] if group_size else torch.ones(len(weight), 1, dtype=torch.float64)
    stored = start.scale.double() / torch.where(column > 0, column, 1)
    absmax = start.scale.double()[:, :, None]
    y = torch.where(absmax > 0, grouped(weight.double(), group_size) / absmax, 0)
    h = torch.ones_like(y) if importance is None else grouped(importance.double()[None], group_size).expand_as(y)
    zero = start.zero_or_symmetric.double()
    down, high = (-y.amin(2)).clamp(min=0), y.amax(2).clamp(min=0)
    flip = (down < high) if not asymmetric else torch.zeros_like(down, dtype=torch.bool)
    span = down + high if asymmetric else torch.maximum(down, high)
    first = most if asymmetric else (most + 1) / 2
    product, square = torch.zeros_like(down), torch.ones_like(down)
    low = torch.where(flip, zero - most, -zero)  # the lowest level, `most` below the highest
    for part in ASYMMETRIC_STEPS if asymmetric else SYMMETRIC_STEPS:
        inverse = part * first / span.clamp(min=2.0**-100)
        candidate = torch.where(flip, zero - most, -zero)
        if asymmetric:
            candidate = -(torch.round(down * inverse) - int(max(part - 1, 0) * first / 2 + 1e-6)).clamp(0, most)
        level = nearest(y * inverse[:, :, None], candidate, most)
        a, b = (h * y * level).sum(2), (h * level * level).sum(2)
        better = MARGIN * product.square() * b < a.square() * square
        product, square = torch.where(better, a, product), torch.where(better, b, square)
        low = torch.where(better, candidate, low)
    best_scale, best_zero = stored, zero
    # columns whose power of two may be the next one: no scale loses a bit by it, or becomes inf
    fine = ((stored == 0) | (stored >= 2.0**-13)).all(1, keepdim=True) & (column < 2.0**126)
    limit = torch.where(fine, 4.0, 2.0) if group_size else torch.inf
    least = (h * (y - nearest(y, -zero, most)).square()).sum(2)
    for _ in range(REFITS + 1):
        scale = product / square * stored
        scale = scale.half().double() if group_size else _short(scale)
        u = (scale / stored)[:, :, None]
        level = nearest(y / u, low, most)
        error = (h * (y - level * u).square()).sum(2)
        better = (error < least) & (scale < limit)
        least = torch.where(better, error, least)
        best_scale = torch.where(better, torch.where(flip, -scale, scale), best_scale)
        best_zero = torch.where(better & asymmetric, -low, best_zero)
        product, square = (h * y * level).sum(2), (h * level * level).sum(2)
    return _rounded(weight.float(), (best_scale * column).float(), best_zero.float(), format, group_size, asymmetric)


def grouped(values: Tensor, group_size: int) -> Tensor:
    """Return ``[n, k]`` as ``[n, groups, group_size]``, padded with zeros."""
    size = group_size or values.shape[1]
    return torch.nn.functional.pad(values, (0, -values.shape[1] % size)).view(len(values), -1, size)


def nearest(v: Tensor, low: Tensor, most: int) -> Tensor:
    """Return the nearest levels within ``low .. low + most``; nan stays."""
    return torch.round(torch.minimum(torch.maximum(v, low[:, :, None]), low[:, :, None] + most))


def _short(scale: Tensor) -> Tensor:
    """Return a float32 rounded to 16 significant bits."""
    return ((scale.float().view(torch.int32) + 0x80) & ~0xFF).view(torch.float32).double()


def _rounded(
    weight: Tensor, scale: Tensor, zero: Tensor, format: str, group_size: int, asymmetric: bool
) -> QuantizedWeight:
    codes = torch.empty_like(weight, dtype=torch.uint8)
    stored = QuantizedWeight.of(codes, scale, zero if asymmetric else None, format, group_size)
    divisor = stored.spread(torch.where(stored.scale != 0, stored.scale, 1))
    codes.copy_(torch.round(weight / divisor + stored.spread(zero)).clamp(0, 2 ** bits_of(format) - 1))
    return stored
