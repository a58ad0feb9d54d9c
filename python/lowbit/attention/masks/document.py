# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: a token sees only its own document."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.score.mod import MaskFunction, MaskMod


def document_ids(cu_seqlens: Tensor) -> Tensor:
    """Return the document of each token, ``[total]`` int32, from the cumulative lengths ``[documents + 1]``."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device=lengths.device), lengths)


def document(ids: Tensor, inner: MaskFunction | None = None) -> MaskMod:
    """Return the mask ``ids[q] == ids[k]``, combined with ``inner`` within each document.

    Args:
        ids: integer ``[L]``, the document of each token, or ``[B, L]``, one row per batch entry; the tokens of a
            document must be contiguous.
        inner: a mask_mod, such as `masks.causal`, that gets positions relative to the start of the document; None for
            no further mask.

    Raises:
        ValueError: ids is neither ``[L]`` nor ``[B, L]``.
    """
    if ids.dim() not in (1, 2):
        raise ValueError(f"document: ids must have shape [L] or [B, L], got {list(ids.shape)}")
    one = ids.dim() == 1
    if inner is None:
        if one:
            return MaskMod(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], "document")
        return MaskMod(lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx], "document")
    start = _starts(ids)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[q_idx] == ids[kv_idx]) & inner(b, h, q_idx - start[q_idx], kv_idx - start[kv_idx])

    def mask_of_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[b, q_idx] == ids[b, kv_idx]) & inner(b, h, q_idx - start[b, q_idx], kv_idx - start[b, kv_idx])

    return MaskMod(mask if one else mask_of_batch, f"document({getattr(inner, '__name__', 'inner')})")


def _starts(ids: Tensor) -> Tensor:
    """Return the position of the first token of each token's document, int32 in the shape of ids."""
    index = torch.arange(ids.shape[-1], dtype=torch.int32, device=ids.device).expand(ids.shape)
    if not ids.numel():
        return index
    begins = torch.cat([torch.ones_like(ids[..., :1], dtype=torch.bool), ids[..., 1:] != ids[..., :-1]], -1)
    return torch.where(begins, index, 0).cummax(-1).values.to(torch.int32)
