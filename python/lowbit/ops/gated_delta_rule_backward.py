# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of gated_delta_rule, for tracing; gated_delta_rule.py calls the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    **_: Any,
) -> tuple[Tensor, ...]:
    return *(tensor.new_empty(tensor.shape) for tensor in (q, k, v, g, beta)), states_like(q, v, state, cu_seqlens)


def states_like(q: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return an empty tensor for the states of all sequences ``[N, Hv, Dk, Dv]``, in the dtype of ``state``, or
    float32."""
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(
        (sequences, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32 if state is None else state.dtype
    )
