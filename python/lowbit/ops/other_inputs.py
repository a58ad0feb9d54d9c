# SPDX-License-Identifier: Apache-2.0
"""Inputs of a packed linear layer that are no dense tensor of floats: nested tensors are multiplied by their values, all
others are refused with the name of what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.ops.fakes import FLOATS, name_of


def other_input(call: Callable[[Tensor], Tensor], x: Tensor, error: Exception) -> Tensor:
    """Return ``call(x)`` of a nested tensor, behind ``error``, which the call of a dense one has raised.

    Raises:
        TypeError: x is no tensor, sparse, or of another dtype; else ``error``.
    """
    if isinstance(x, Tensor) and x.is_nested:
        return of_nested(call, x)
    _refuse(x, error)


def of_nested(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the nested tensor of ``call`` of the rows of ``x``, a nested one of either layout; one call for all rows."""
    if x.layout is torch.jagged:
        if x._ragged_idx == x.dim() - 1:
            raise ValueError(f"linear: the last dimension of x must be in_features, got the ragged one of {x.dim()}")
        return torch.nested.nested_tensor_from_jagged(
            call(x.values()), x.offsets(), x.lengths(), jagged_dim=x._ragged_idx
        )
    parts = x.unbind()
    if not parts or any(part.dim() < 2 or part.shape[-1] != parts[0].shape[-1] for part in parts):
        return torch.nested.as_nested_tensor([call(part) for part in parts])
    rows = call(torch.cat([part.flatten(0, -2) for part in parts]))
    counts = [part.shape[:-1].numel() for part in parts]
    results = [y.unflatten(0, part.shape[:-1]) for y, part in zip(rows.split(counts), parts, strict=True)]
    return torch.nested.as_nested_tensor(results)


def _refuse(x: Tensor, error: Exception) -> NoReturn:
    if not isinstance(x, Tensor):
        functional.linear(x, torch.empty(0, device="cpu"))  # raises torch's own TypeError
    elif x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise TypeError(f"linear: x must be a dense tensor, got {layout}; x.to_dense() is one") from None
    elif x.dtype not in FLOATS:
        raise TypeError(f"linear: x must be float32, bfloat16 or float16, got {name_of(x.dtype)}") from None
    raise error
