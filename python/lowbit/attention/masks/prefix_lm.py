# SPDX-License-Identifier: Apache-2.0
"""Every query sees the prefix, and the rest is causal (T5, UniLM)."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Return the mask ``k < prefix`` or causal.

    Args:
        prefix: the length of the prefix: one for all, or an integer tensor ``[B]``.

    Raises:
        ValueError: prefix is negative, or a tensor that is not ``[B]``.
    """
    if isinstance(prefix, Tensor) and prefix.dim() != 1:
        raise ValueError(f"prefix_lm: prefix must be an int or a tensor [B], got shape {list(prefix.shape)}")
    if not isinstance(prefix, Tensor) and prefix < 0:
        raise ValueError(f"prefix_lm: prefix must be at least 0, got prefix={prefix}")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix) | (q_idx >= kv_idx)

    def mask_of_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

    return MaskMod(mask_of_batch, "prefix_lm") if isinstance(prefix, Tensor) else MaskMod(mask, f"prefix_lm({prefix})")
