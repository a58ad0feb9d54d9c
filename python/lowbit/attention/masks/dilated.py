# SPDX-License-Identifier: Apache-2.0
"""Every n-th key in a window around the query (LongNet, Longformer)."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def dilated(window: int, dilation: int) -> MaskMod:
    """Return the mask ``|q - k| <= window`` with ``q - k`` a multiple of ``dilation``.

    Raises:
        ValueError: window is below 0 or dilation below 1.
    """
    if window < 0 or dilation < 1:
        raise ValueError(
            f"dilated: window must be at least 0 and dilation at least 1, got window={window} dilation={dilation}"
        )

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        return (distance <= window) & (distance % dilation == 0)

    return MaskMod(mask, f"dilated({window}, {dilation})")
