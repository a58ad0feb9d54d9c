# SPDX-License-Identifier: Apache-2.0
"""flex_attention below its checks: mods become score programs, the block mask its lists, and the op is called. Eager and compiled calls end here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowbit.attention.block_mask import to_classes
from lowbit.attention.program import UnknownOp
from lowbit.attention.through_torch import attention_through_torch
from lowbit.attention.trace import BoundProgram, bind, warn_unknown
from lowbit.ops.attention import attention

_NAME = "flex_attention"
WHOLE = 1 << 30  # torch's block size for "no block mask"
_NOTHING = BoundProgram([], [])


def run_mods(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None, block_mask: BlockMask | None, scale: float,
    dropout_p: float = 0.0, sink: Tensor | None = None, want_max_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Trace the mods and run the op: (out, lse, max_scores). Everything has been checked."""
    whole = block_mask is None or tuple(block_mask.BLOCK_SIZE) == (WHOLE, WHOLE)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    blocks, block_size = [], (128, 128)
    if block_mask is not None and not whole:
        block_size = tuple(block_mask.BLOCK_SIZE)
        blocks = [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None:
            blocks += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
        if block_mask.kv_num_blocks.dtype != torch.int32:  # from_kv_blocks takes any ints
            blocks = [tensor.to(torch.int32) for tensor in blocks]
    argument = "score_mod"
    try:
        score = _NOTHING if score_mod is None else bind(_NAME, score_mod, mask=False, dtype=query.dtype)
        argument = "mask_mod"
        mask = _NOTHING if mask_mod is None else bind(_NAME, mask_mod, mask=True)
    except UnknownOp as unknown:
        warn_unknown(_NAME, argument, unknown)
        classes = None if not blocks else to_classes(block_mask)
        return attention_through_torch(query, key, value, score_mod, mask_mod, scale, classes, block_size, dropout_p, sink)
    return attention(
        query, key, value, scale=scale, dropout_p=dropout_p, score_mod=score.code, score_captured=score.captured, mask_mod=mask.code,
        mask_captured=mask.captured, blocks=blocks, block_size=block_size, sink=sink, want_max_scores=want_max_scores,
    )  # fmt: skip
