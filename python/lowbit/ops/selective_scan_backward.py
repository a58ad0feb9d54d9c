# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of selective_scan, for tracing; selective_scan.py calls the op."""

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
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    **_: Any,
) -> tuple[Tensor, ...]:
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    grads = (x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs)
    return *grads, states_like(x, A, state, cu_seqlens)


def states_like(x: Tensor, A: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return an empty tensor for the states of all sequences ``[N, D, S]``, in the dtype of ``state``, or
    float32."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((sequences, *A.shape), dtype=torch.float32 if state is None else state.dtype)
