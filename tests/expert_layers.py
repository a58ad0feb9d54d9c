# SPDX-License-Identifier: Apache-2.0
"""A layer of experts in float64, with activations rounded as kernels round them, and how far off a kernel may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, testing


@dataclass
class ExpertsLayer:
    """What one layer computes, and the budget of it.

    Args:
        first, down: the decoded weights of each expert.
        x_formats: of the activations of both products.
        function: ``[..., n]`` of the first product to ``[..., I]``.
        interleaved: columns of the first product are gate, up, gate, up and so on.
        first_bias, down_bias: ``[E, n]``, or None.
    """

    first: list[Any]
    down: list[Any]
    x_formats: tuple[str, str]
    function: Callable[[Tensor], Tensor]
    interleaved: bool = False
    first_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result in float64, and its budget: the errors of the first product go through the gate and the
        second one."""
        u, roundoff = testing.ROUNDOFF["float32"], testing.ROUNDOFF[str(x.dtype)[6:]]
        n = dense_of(self.down[0]).shape[0]
        wanted, allowed = torch.zeros(len(x), n, dtype=torch.float64), torch.zeros(len(x), n, dtype=torch.float64)
        added = torch.zeros_like(wanted)
        for e in range(len(self.first)):
            value, error = self.expert(e, x)
            factor = (weights.double() * (index == e)).sum(1, keepdim=True)
            weight = (weights.double().abs() * (index == e)).sum(1, keepdim=True)
            wanted += factor * value
            allowed += weight * error
            added += weight * (value.abs() + error)
        allowed += (index.shape[1] + 1) * u * added
        return wanted, allowed + roundoff * (wanted.abs() + allowed) + torch.finfo(x.dtype).smallest_normal * roundoff

    def expert(self, e: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of one expert for every token, float64, and how far off it may be."""
        (up, down), (of_x, of_hidden), form = (self.first[e], self.down[e]), self.x_formats, self.function
        u, roundoff = testing.ROUNDOFF["float32"], testing.ROUNDOFF[str(x.dtype)[6:]]
        up_bias, down_bias = (0.0 if bias is None else bias[e].double() for bias in (self.first_bias, self.down_bias))
        sums = reference.linear.product(x, up, of_x) + up_bias
        error = (x.shape[1] + 8) * u * (reference.linear.magnitude(x, up, of_x) + abs(up_bias))
        hidden = form(sums)
        # The change of the gate by errors of both factors, twice for its curvature, and 16 roundings of its terms.
        corners = [(form(sums + a * error * sign) - hidden).abs() for a in (1, -1) for sign in (1, self.alternating(sums))]
        size = form(sums.abs()).abs() + hidden.abs() + 1e-3 * sums.abs().amax(-1, keepdim=True) ** 2
        off = 2 * functools.reduce(torch.maximum, corners) + 16 * u * size + roundoff * hidden.abs()
        off = off + torch.finfo(x.dtype).smallest_normal * roundoff
        dense = dense_of(down)
        taken = hidden.float() if of_hidden != "float" else hidden
        value = rounded(taken, down, of_hidden) @ dense.T + down_bias
        magnitude = reference.linear.magnitude(hidden.float(), down, of_hidden) + abs(down_bias)
        return value, (dense.shape[1] + 8) * u * magnitude + of_error(hidden, off, down, of_hidden) @ dense.abs().T

    def alternating(self, sums: Tensor) -> Tensor:
        """+1 for gates, -1 for ups."""
        signs = torch.ones(sums.shape[-1], dtype=torch.float64)
        signs[slice(1, None, 2) if self.interleaved else slice(sums.shape[-1] // 2, None)] = -1
        return signs


def dense_of(weight: Any) -> Tensor:
    return (weight.decode() if hasattr(weight, "decode") else weight).double()


def rounded(x: Tensor, weight: Any, x_format: str) -> Tensor:
    """x as it enters a product, float64."""
    return reference.linear._activations(x, weight, x_format)


def of_error(x: Tensor, error: Tensor, weight: Any, x_format: str) -> Tensor:
    """How much the rounded x may differ where each of its elements is off by so much: codes beside a boundary are
    others, and scales are as far off as the largest elements."""
    if x_format == "float":
        return error
    length = x.shape[1] if x_format != "int8_group" else weight.group_size or x.shape[1]
    x, both = x.float().double(), x_format == "int8_row_asymmetric"
    relative, least, most = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for begin in range(0, x.shape[1], length):  # elements that have one scale; its own ends move it
        part = slice(begin, begin + length)
        size = x[:, part].abs().amax(1, True)
        relative[:, part] = error[:, part].amax(1, True) / size.clamp(min=1e-30)
        least[:, part] = x[:, part].amin(1, True).clamp(max=0) if both else -size
        most[:, part] = x[:, part].amax(1, True).clamp(min=0) if both else size
    ends, exact = (x <= least) | (x >= most), rounded(x, weight, x_format)
    reach = torch.where(ends, 0.0, error + 2 * relative * x.abs())
    moved = [rounded((x + sign * reach).clamp(least, most), weight, x_format) for sign in (1, -1)]
    off = torch.maximum(*((each - exact).abs() for each in moved)) + 2 * relative * exact.abs()
    return off + ends * both * (most - least) / 254  # a zero point between two codes
