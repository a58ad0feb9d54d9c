# SPDX-License-Identifier: Apache-2.0
"""The BlockMask of documents packed into one sequence, given by their offsets (``cu_seqlens``)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from lowbit.attention.block_mask import EMPTY, FULL, PARTIAL, from_classes, to_classes
from lowbit.ops.tracing import is_traced


def with_documents(cu_seqlens: Tensor, block_mask: BlockMask | None, query: Tensor, key: Tensor) -> BlockMask:
    """Return ``block_mask``, or a mask of everything if None, limited to pairs within a document. It consists of torch
    ops, so that torch.compile can trace it.

    Args:
        cu_seqlens: int ``[documents + 1]``, see flex_attention.
        block_mask: the BlockMask or None.
        query, key: ``[B, Hq, L, E]`` and ``[B, Hkv, L, E]``.

    Raises:
        TypeError: cu_seqlens is not a tensor.
        ValueError: cu_seqlens is not an ascending int tensor from 0 to L (RuntimeError in a compiled call or on a GPU),
            or query and key differ in length.
    """
    length = query.size(2)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"flex_attention: cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 1:
        raise ValueError(
            f"flex_attention: cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    if key.size(2) != length:
        raise ValueError(
            f"flex_attention: cu_seqlens needs query and key of one length, got {length} and {key.size(2)}"
        )
    ascends = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
    if is_traced() or cu_seqlens.is_cuda:  # no synchronization with a GPU
        torch._assert_async(ascends, "flex_attention: cu_seqlens must ascend from 0 to the length")
    elif not ascends:
        raise ValueError(
            f"flex_attention: cu_seqlens must ascend from 0 to the length {length}, got {cu_seqlens.tolist()[:8]}..."
        )
    tokens = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document[q_idx] == document[kv_idx]

    block_size = (128, 128) if block_mask is None else block_mask.BLOCK_SIZE
    classes = _document_classes(document, *block_size)
    if block_mask is None:
        return from_classes(classes, same_document, (length, length), block_size)
    classes = torch.minimum(classes, to_classes(block_mask))
    return from_classes(classes, and_masks(same_document, block_mask.mask_mod), (length, length), block_size)


def _document_classes(document: Tensor, q_block: int, kv_block: int) -> Tensor:
    """Return the block classes, uint8 ``[1, 1, q blocks, kv blocks]``, from the ascending document of each token
    ``[L]``. Two blocks meet if their ranges of documents do."""
    (q_first, q_last, q_ends), (k_first, k_last, k_ends) = (_ranges(document, size) for size in (q_block, kv_block))
    meet = (q_first[:, None] <= k_last) & (k_first <= q_last[:, None])
    one = (q_first == q_last)[:, None] & (k_first == k_last) & ~q_ends[:, None] & ~k_ends
    return torch.where(meet, torch.where(one, FULL, PARTIAL), EMPTY).to(torch.uint8)[None, None]


def _ranges(document: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each block of tokens, its first and last document, and whether it extends past the end (such a block
    is never FULL, as in torch)."""
    length = document.shape[0]
    begin = torch.arange(0, length, block, device=document.device)
    end = begin + block
    return document[begin], document[end.clamp(max=length) - 1], end > length
