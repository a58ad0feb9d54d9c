# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (arXiv 2108.12409): a slope per head over the distance."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.attention.mod import ScoreMod


def alibi(heads: int) -> ScoreMod:
    """Return the mod ``score + (k - q) * 2 ** (-8 (h + 1) / heads)``.

    Raises:
        ValueError: heads below 1.
    """
    if heads < 1:
        raise ValueError(f"alibi: heads must be at least 1, got heads={heads}")

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (kv_idx - q_idx) * torch.exp2(-(h + 1) * 8.0 / heads)

    return ScoreMod(mod, f"alibi({heads})")
