# SPDX-License-Identifier: Apache-2.0
"""Each query sees itself and the last keys before it (Mistral, Gemma)."""

from __future__ import annotations

from torch import Tensor

from lowbit.attention.mod import MaskMod


def sliding_window(window: int) -> MaskMod:
    """Return the mask ``0 <= q - k <= window``: ``window`` keys back, and itself.

    Raises:
        ValueError: window below 0.
    """
    if window < 0:
        raise ValueError(f"sliding_window: window must be at least 0, got window={window}")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    return MaskMod(mask, f"sliding_window({window})")
