# SPDX-License-Identifier: Apache-2.0
"""Random codes of small floats for checkpoints, with the values that the formats define."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def float8_codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Every finite code of float8_e4m3fn at random."""
    codes = torch.randint(0, 256, shape, generator=generator)
    codes = torch.where(codes & 127 == 127, 0, codes)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes of e2m1, two to a byte, the first lowest, and their values in float64."""
    codes = torch.randint(0, 16, shape, generator=generator)
    pairs = codes.view(shape[0], -1, 2)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).to(torch.uint8), torch.tensor(E2M1, dtype=torch.float64)[codes]


def power_scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Codes of e8m0, powers of two between 2^-12 and 2^-4."""
    return torch.randint(115, 124, shape, generator=generator).to(torch.uint8)
