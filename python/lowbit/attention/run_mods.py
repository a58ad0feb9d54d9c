# SPDX-License-Identifier: Apache-2.0
"""flex_attention after its checks: turn mods into score programs and the block mask into lists, and call the op. Both
eager and compiled calls run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask

from lowbit.attention.block_mask import to_classes
from lowbit.attention.through_torch import attention_through_torch
from lowbit.ops.attention import attention
from lowbit.score.program import UnknownOp
from lowbit.score.program_cache import BoundProgram, bind, warn_unknown

_NAME = "flex_attention"
WHOLE = 1 << 30  # torch's block size for "no block mask"
_NOTHING = BoundProgram([], [])


def run_mods(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None, block_mask: BlockMask | None,
    scale: float,
    dropout_p: float = 0.0, sink: Tensor | None = None, want_max_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Trace the mods and run the op; return (out, lse, max_scores). The arguments were already checked."""
    mask_mod = None if block_mask is None else block_mask.mask_mod
    blocks, block_size = _lists(block_mask, *query.shape[:2])
    argument = "mask_mod" if score_mod is None else "score_mod"
    try:
        if forward_ad._current_level >= 0 and (score_mod or mask_mod or blocks):  # -1 outside of forward mode
            raise UnknownOp("forward mode (torch.func.jvp, jacfwd)")
        score = _NOTHING if score_mod is None else bind(_NAME, score_mod, mask=False, dtype=query.dtype)
        argument = "mask_mod"
        mask = _NOTHING if mask_mod is None else bind(_NAME, mask_mod, mask=True)
    except UnknownOp as unknown:
        warn_unknown(_NAME, argument, unknown)
        classes = None if not blocks else to_classes(block_mask)[: query.shape[0], : query.shape[1]]
        return attention_through_torch(
            query, key, value, score_mod, mask_mod, scale, classes, block_size, dropout_p, sink
        )
    return attention(
        query, key, value, scale=scale, dropout_p=dropout_p, score_mod=score.code, score_captured=score.captured,
        mask_mod=mask.code,
        mask_captured=mask.captured, blocks=blocks, block_size=block_size, sink=sink, want_max_scores=want_max_scores,
    )  # fmt: skip


def _lists(mask: BlockMask | None, batch: int, heads: int) -> tuple[list[Tensor], tuple[int, int]]:
    """Return the lists of blocks in the form that the op takes, and the block size. From a mask for more batch entries
    or heads, the first are taken, as in torch."""
    if mask is None or tuple(mask.BLOCK_SIZE) == (WHOLE, WHOLE):
        return [], (128, 128)
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_num_blocks is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices]
    if mask.kv_num_blocks.shape[0] > batch or mask.kv_num_blocks.shape[1] > heads:
        lists = [tensor[:batch, :heads] for tensor in lists]
    if mask.kv_num_blocks.dtype != torch.int32:  # from_kv_blocks accepts other integer dtypes
        lists = [tensor.to(torch.int32) for tensor in lists]
    return lists, tuple(mask.BLOCK_SIZE)
