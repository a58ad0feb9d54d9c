# SPDX-License-Identifier: Apache-2.0
"""The training mask of block diffusion language models (BD3-LM, arXiv 2503.09573), over the noised sequence followed by
the clean one."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def block_diffusion(length: int, block_size: int) -> MaskMod:
    """Return the mask over ``2 * length`` tokens: 0..length - 1 are noised, the rest clean.

    A noised token sees the noised tokens of its own block and the clean tokens of earlier blocks. A clean token sees
    the clean tokens of its own block and of earlier ones.

    Raises:
        ValueError: length or block_size is below 1.
    """
    if length < 1 or block_size < 1:
        raise ValueError(
            f"block_diffusion: length and block_size must be at least 1, got length={length} block_size={block_size}"
        )

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block, kv_block = (q_idx % length) // block_size, (kv_idx % length) // block_size
        own_noised = ~q_clean & ~kv_clean & (q_block == kv_block)
        earlier_clean = ~q_clean & kv_clean & (q_block > kv_block)
        clean = q_clean & kv_clean & (q_block >= kv_block)
        return own_noised | earlier_clean | clean

    return MaskMod(mask, f"block_diffusion({length}, {block_size})")
