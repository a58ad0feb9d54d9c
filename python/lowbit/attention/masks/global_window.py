# SPDX-License-Identifier: Apache-2.0
"""A window around each query, and global tokens that see all tokens and are seen by all (Longformer, BigBird)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.score.mod import MaskMod


def global_window(window: int, is_global: Tensor) -> MaskMod:
    """Return the mask ``|q - k| <= window``, or query or key is global.

    Args:
        window: the number of keys to each side.
        is_global: bool ``[L]``.

    Raises:
        ValueError: window is below 0, or is_global is not bool ``[L]``.
    """
    if window < 0:
        raise ValueError(f"global_window: window must be at least 0, got window={window}")
    if is_global.dtype != torch.bool or is_global.dim() != 1:
        raise ValueError(f"global_window: is_global must be bool [L], got {is_global.dtype} {list(is_global.shape)}")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((q_idx - kv_idx).abs() <= window) | is_global[q_idx] | is_global[kv_idx]

    return MaskMod(mask, f"global_window({window})")
