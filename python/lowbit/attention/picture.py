# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks and mods, for anything that `flex_attention` takes: torch's BlockMask and plain functions have no
method for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from lowbit.attention.block_mask import FULL, to_classes
from lowbit.score.mod import MaskMod, ScoreMod, draw
from lowbit.score.program_cache import positional_arguments


def plot(
    mod: BlockMask | Callable[..., Any],
    q_len: int = 64,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    ax: Any = None,
) -> Any:
    """Draw a BlockMask, a mask_mod or a score_mod with matplotlib and return the axes: queries down, keys across.

    A BlockMask is drawn by blocks: white if empty (skipped), light if partial (mask_mod is called), dark if full
    (mask_mod is not called).

    Args:
        mod: a BlockMask, a mask_mod of ``(b, h, q_idx, kv_idx)`` or a score_mod of ``(score, b, h, q_idx, kv_idx)``.
        q_len, kv_len: the lengths for which a function is drawn; a BlockMask has its own.
        b, h: the batch entry and head; a BlockMask with only one applies it to all.
        ax: matplotlib axes to draw into; None creates new ones.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: ``mod`` is not a BlockMask, and takes neither 4 nor 5 positional arguments.

    Example:
        >>> lowbit.attention.plot(lowbit.create_block_mask(masks.sliding_window(512), None, None, 4096, 4096))
    """
    if isinstance(mod, BlockMask):
        classes = to_classes(mod)
        shown = classes[min(b, classes.shape[0] - 1), min(h, classes.shape[1] - 1)]
        block = mod.BLOCK_SIZE[0], mod.BLOCK_SIZE[1]
        name = getattr(mod.mask_mod, "__name__", type(mod.mask_mod).__name__)
        lengths = shown.shape[0] * block[0], shown.shape[1] * block[1]
        return draw(shown.double(), f"{name}, blocks of {block[0]} x {block[1]}", ax, lengths, vmin=0, vmax=FULL)
    count = positional_arguments(mod) if callable(mod) else -1
    if count not in (4, 5):
        what = f"a function of {count}" if callable(mod) else type(mod).__name__
        raise TypeError(
            f"plot: mod must be a BlockMask, or take 4 (mask_mod) or 5 (score_mod) positional arguments, got {what}"
        )
    name = getattr(mod, "__name__", type(mod).__name__)
    drawn = (MaskMod if count == 4 else ScoreMod)(mod, name)
    return drawn.plot(q_len, kv_len, b=b, h=h, ax=ax)
