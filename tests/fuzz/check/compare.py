# SPDX-License-Identifier: Apache-2.0
"""Comparing with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.testing import ROUNDOFF

UNIT = {torch.float64: 2.0**-53, **{getattr(torch, name): unit for name, unit in ROUNDOFF.items()}}
"""Largest relative error of rounding to the nearest value of a dtype."""


class Wrong(AssertionError):
    """lowbit differs from the reference."""


def unit_of_sums(dtype: torch.dtype) -> float:
    """The unit of the dtype that sums are accumulated in."""
    return UNIT[torch.float64 if dtype == torch.float64 else torch.float32]


def within(actual: Tensor, wanted: Tensor, allowed: Tensor | float, what: str) -> None:
    """Fail unless shapes agree and every element is within its budget; inf and nan must be where the reference has them."""
    if actual.shape != wanted.shape:
        raise Wrong(f"{what}: shape {list(actual.shape)}, wanted {list(wanted.shape)}")
    actual, wanted = actual.detach(), wanted.detach().double()
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand(wanted.shape)
    largest = torch.finfo(actual.dtype).max if actual.is_floating_point() else torch.inf
    overflows = (wanted.abs() + allowed > largest) & wanted.isfinite()
    got = actual.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    bad = ~(same | ((got - wanted).abs() <= allowed) | overflows)
    if bad.any():
        at = tuple(int(index) for index in bad.nonzero()[0])
        finite = "finite" if wanted[at].isfinite() else str(wanted[at].item())
        found = "finite" if got[at].isfinite() else str(got[at].item())
        raise Wrong(
            f"{what} is {found}, wanted {finite}: element {list(at)} is {got[at].item():.9g}, wanted {wanted[at].item():.9g} "
            f"+- {allowed[at].item():.3g}; {int(bad.sum())} of {bad.numel()} elements are off"
        )


def refused(call: Callable[[], Any], what: str) -> None:
    """Fail unless the call raises (ValueError, TypeError, RuntimeError or their kin)."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError, LookupError, NotImplementedError):
        return
    raise Wrong(f"{what} was accepted")


def taken_by(call: Callable[[], Any]) -> bool:
    """Whether torch takes what we are about to give to lowbit."""
    try:
        call()
    except Exception:
        return False
    return True
