# SPDX-License-Identifier: Apache-2.0
"""A learned bias for each score, with a gradient (AlphaFold's pair bias, Swin)."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import ScoreMod


def learned_bias(bias: Tensor) -> ScoreMod:
    """Return the mod that adds ``bias``.

    Args:
        bias: ``[L, S]``, ``[H, L, S]`` or ``[B, H, L, S]``; it may require grad.

    Raises:
        ValueError: bias has another number of dimensions.
    """
    if bias.dim() not in (2, 3, 4):
        raise ValueError(f"learned_bias: bias must be [L, S], [H, L, S] or [B, H, L, S], got {list(bias.shape)}")

    def of_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[q_idx, kv_idx]

    def of_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, q_idx, kv_idx]

    def of_batch(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h, q_idx, kv_idx]

    return ScoreMod((of_position, of_head, of_batch)[bias.dim() - 2], f"learned_bias{list(bias.shape)}")
