# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantization of activations: x is approximated by scale * (code - zero), with integer codes within +-127.

    int8_group           symmetric, one scale per row and group of the weight (per row when the weight has no groups)
    int8_row             symmetric, one scale per row
    int8_row_asymmetric  one scale and one integer zero point per row; its range contains 0
    float8_row           float8_e4m3fn, one scale per row; its codes are the float8 numbers within +-448

The scale is computed in float32; rounding is half to even. If a row has inf or nan, its scale is not finite, and so the
whole row is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.reference.quantize import SMALLEST, largest_level

FLOAT8_MAX = largest_level("fp8_e4m3")


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Codes with the scale and zero point of each element, all ``[m, k]``."""

    codes: Tensor  # float64: integers within +-127, or float8 numbers
    scale: Tensor  # float32
    zero: Tensor  # float64 integers; 0 if symmetric

    def decode(self) -> Tensor:
        """Return the factors that the kernel multiplies, float64 ``[m, k]``."""
        return self.scale.double() * (self.codes - self.zero)


def quantize_activations(x: Tensor, x_format: str, group_size: int) -> QuantizedActivations:
    """Quantize activations ``[m, k]`` of any float dtype."""
    x = x.float()
    m, k = x.shape
    size = group_size if x_format == "int8_group" and group_size else max(k, 1)
    groups = torch.nn.functional.pad(x, (0, -k % size)).view(m, -1, size)
    if x_format == "int8_row_asymmetric":
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scale = (high - low) / 254
        zero = torch.where(scale >= SMALLEST, torch.round(-127 - low / scale), 0)
    else:
        scale = groups.abs().amax(2, keepdim=True) / (FLOAT8_MAX if x_format == "float8_row" else 127)
        zero = torch.zeros_like(scale)
    inverse = torch.where(scale >= SMALLEST, 1 / scale, scale * 0)
    scaled = (groups.double() * inverse.double() + zero).float()  # one fma
    if x_format == "float8_row":
        codes = scaled.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    else:
        codes = torch.round(scaled).clamp(-127, 127)

    def flat(values: Tensor) -> Tensor:
        return values.expand_as(groups).reshape(m, -1)[:, :k]

    return QuantizedActivations(flat(codes).double(), flat(scale), flat(zero).double())
