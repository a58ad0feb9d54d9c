# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of ssd, for tracing; ssd.py calls the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fake(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    **_: Any,
) -> tuple[Tensor, ...]:
    inputs = (x, dt, A, B, C, *(A if tensor is None else tensor for tensor in (D, dt_bias)))
    return *(tensor.new_empty(tensor.shape) for tensor in inputs), states_like(x, B, state, cu_seqlens)


def states_like(x: Tensor, B: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return an empty tensor for the states of all sequences ``[N, H, P, S]``, in the dtype of ``state``, or
    float32."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((sequences, *x.shape[2:], B.shape[3]), dtype=torch.float32 if state is None else state.dtype)
