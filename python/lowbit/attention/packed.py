# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one sequence, given by where they begin (``cu_seqlens``): as a BlockMask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from lowbit.attention import block_mask as blocks_of


def with_documents(cu_seqlens: Tensor, block_mask: BlockMask | None, query: Tensor, key: Tensor) -> BlockMask:
    """Return ``block_mask`` (None: everything) within documents.

    Raises:
        ValueError: cu_seqlens is not an ascending int tensor from 0 to the length, or the lengths of query and key differ.
    """
    length = query.size(2)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 1:
        raise ValueError(f"flex_attention: cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if key.size(2) != length:
        raise ValueError(f"flex_attention: cu_seqlens needs query and key of one length, got {length} and {key.size(2)}")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != length or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"flex_attention: cu_seqlens must ascend from 0 to the length {length}, got {cu_seqlens.tolist()[:8]}...")
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(length, dtype=cu_seqlens.dtype), right=True, out_int32=True)

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document[q_idx] == document[kv_idx]

    if block_mask is None:
        return blocks_of.create_block_mask(same_document, None, None, length, length)
    classes = blocks_of.block_classes(same_document, 1, 1, length, length, *block_mask.BLOCK_SIZE)
    classes = torch.minimum(classes, blocks_of.to_classes(block_mask))
    return blocks_of.from_classes(classes, and_masks(same_document, block_mask.mask_mod), (length, length), block_mask.BLOCK_SIZE)
