# SPDX-License-Identifier: Apache-2.0
"""Gradients of the recurrent ops and their references, and how close they must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit import testing


def gradients(
    call: dict[str, Tensor], options: dict[str, Any], grads: tuple[Tensor, Tensor | None], function: Any, wide: bool
) -> dict[str, Tensor]:
    """Those of all tensors of the call, in float64 or as they are."""
    leaves = {name: (tensor.double() if wide else tensor).detach().requires_grad_() for name, tensor in call.items()}
    results = function(**leaves, **options)
    used = [
        (result, grad.to(result.dtype))
        for result, grad in zip(results, grads, strict=True)
        if grad is not None and result.requires_grad
    ]
    found = torch.autograd.grad(
        [result for result, _ in used], list(leaves.values()), [grad for _, grad in used], materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], terms: int, what: str) -> None:
    """Within the roundings of sums of so many terms, of the size of the largest gradient of the tensor (a chain of products has no
    smaller bound that is simple), and of the result to its dtype."""
    for name, theirs in wanted.items():
        ours = found[name]
        roundoff = testing.ROUNDOFF[str(ours.dtype).removeprefix("torch.")]
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        allowed = 2.0**-24 * (64 + 8 * terms) * max(largest, 1.0) + roundoff * theirs.abs()
        testing.assert_within(ours, theirs, allowed + roundoff * 1e-7, what=f"{what}: gradient of {name}")
