# SPDX-License-Identifier: Apache-2.0
"""Each query sees itself and the last keys before it (Mistral, Gemma)."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def sliding_window(window: int) -> MaskMod:
    """Return the mask ``0 <= q - k < window``: ``window`` keys, the query's own and the ``window - 1`` before it.

    The number counts as in transformers' ``sliding_window``, in Mistral, and in the quantized cache's ``window``.

    Raises:
        ValueError: window is below 1.
    """
    if window < 1:
        raise ValueError(f"sliding_window: window must be at least 1 (a query sees itself), got window={window}")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return MaskMod(mask, f"sliding_window({window})")
