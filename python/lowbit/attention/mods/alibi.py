# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (arXiv 2108.12409): each head adds the distance times its slope."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.score.mod import ScoreMod


def alibi(heads: int) -> ScoreMod:
    """Return the mod ``score + (k - q) * slope[h]`` with the paper's slopes.

    If ``heads`` is a power of two, they are ``2 ** (-8 (h + 1) / heads)``. Otherwise the first heads take the slopes of
    the power of two below, and the rest every other slope of the power of two above, as in the authors' code, BLOOM and
    MPT.

    Raises:
        ValueError: heads is below 1.
    """
    if heads < 1:
        raise ValueError(f"alibi: heads must be at least 1, got heads={heads}")
    whole = 1 << (heads.bit_length() - 1)  # the power of two at or below
    per_head, per_other = 8.0 / whole, 4.0 / whole

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        head = h.to(torch.float32)  # independent of torch's default dtype
        exponent = (head + 1) * per_head
        if whole != heads:
            exponent = torch.where(h < whole, exponent, (2 * (head - whole) + 1) * per_other)
        return score + (kv_idx - q_idx) * torch.exp2(-exponent)

    return ScoreMod(mod, f"alibi({heads})")
