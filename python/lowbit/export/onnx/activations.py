# SPDX-License-Identifier: Apache-2.0
"""Activations rounded as lowbit's kernels round them, in torch ops that its exporter translates to ONNX.

    scale = amax / 127                 symmetric, of a row or of each group of it (float8: amax / 448)
    scale = (high - low) / 254         asymmetric, of a row whose range contains 0; zero = round(-127 - low / scale)
    code  = round(x / scale + zero)    half to even

The weight is multiplied by scale * (code - zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.quant.codes import SMALLEST

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class RoundedActivations:
    """Codes, float32 ``[..., groups, size]``, padded with zeros if the row ends before its last group does; scale and
    zero are ``[..., groups, 1]``."""

    k: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None  # None if symmetric

    def decode(self) -> Tensor:
        """Return the dequantized activations, ``[..., k]``."""
        steps = self.codes if self.zero is None else self.codes - self.zero
        return (steps * self.scale).flatten(-2)[..., : self.k]


def rounded(x: Tensor, x_format: str, group_size: int) -> RoundedActivations:
    """Round ``x``, float32 ``[..., k]``. ``group_size`` is that of the weight, 0 for per channel."""
    k = x.shape[-1]
    size = group_size if x_format == "int8_group" and group_size else k
    groups = functional.pad(x, (0, -k % size)).unflatten(-1, (-1, size)) if k % size else x.unflatten(-1, (-1, size))
    if x_format == "int8_row_asymmetric":
        return _asymmetric(groups, k)
    most = _FLOAT8_MAX if x_format == "float8_row" else 127
    scale = groups.abs().amax(-1, keepdim=True) / most
    codes = (groups * _inverse(scale)).clamp(-most, most)
    codes = codes.to(torch.float8_e4m3fn).float() if x_format == "float8_row" else codes.round()
    return RoundedActivations(k, codes, scale, None)


def _asymmetric(groups: Tensor, k: int) -> RoundedActivations:
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 254
    zero = torch.where(scale >= SMALLEST, (-127 - low / scale).round(), 0.0)
    # The kernels round x / scale + zero once, with a fused multiply-add. In float64 the product is exact.
    codes = (groups.double() * _inverse(scale).double() + zero.double()).float()
    return RoundedActivations(k, codes.round().clamp(-127, 127), scale, zero)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, or 0 for a row of zeros. It is not finite if the row is not."""
    return torch.where(scale >= SMALLEST, 1 / scale, scale * 0)
