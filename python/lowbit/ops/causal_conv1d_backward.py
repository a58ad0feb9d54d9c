# SPDX-License-Identifier: Apache-2.0
"""The shapes of the gradients of `causal_conv1d`, and of its states."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def states_like(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return an empty state ``[N, D, S]`` for a call, whose S is that of ``state``."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(sequences, x.shape[2], weight.shape[1] - 1 if state is None else state.shape[2])


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_bias = x.new_empty(x.shape[2:], dtype=(weight if bias is None else bias).dtype)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), of_bias, states_like(x, weight, state, cu_seqlens)
