# SPDX-License-Identifier: Apache-2.0
"""Results and gradients beside float64, by roundings of their dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.testing import ROUNDOFF


def assert_close(
    found: list[Tensor], wanted: list[Tensor], roundings: float, dtype: torch.dtype = torch.float32
) -> None:
    """Each within so many roundings of its largest value."""
    allowed = roundings * ROUNDOFF[str(dtype).removeprefix("torch.")]
    assert len(found) == len(wanted)
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype is dtype
        assert bool((ours.double() - exact).abs().max() <= allowed * exact.abs().max()), (ours, exact)


def normalized(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """RMSNorm with eps of 1e-6."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (offset + weight)
