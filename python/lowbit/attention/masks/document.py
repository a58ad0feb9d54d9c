# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: nobody sees into another document."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.attention.mod import MaskFunction, MaskMod


def document_ids(cu_seqlens: Tensor) -> Tensor:
    """Return the number of the document of each token, ``[total]`` int32, from the cumulative lengths ``[documents + 1]``."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)


def document(ids: Tensor, inner: MaskFunction | None = None) -> MaskMod:
    """Return the mask ``ids[q] == ids[k]``, and ``inner`` within each document.

    Args:
        ids: integer ``[L]``, the document of each token; tokens of a document stand together.
        inner: a mask_mod that gets positions counted from the start of the document, `masks.causal` for one; None for all.

    Raises:
        ValueError: ids that are not ``[L]``.
    """
    if ids.dim() != 1:
        raise ValueError(f"document: ids must have shape [L], got {list(ids.shape)}")
    if inner is None:
        return MaskMod(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], "document")
    index = torch.arange(len(ids), dtype=torch.int32)
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[1:] != ids[:-1]])[: len(ids)]
    start = torch.where(begins, index, 0).cummax(0).values.to(torch.int32) if len(ids) else index

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[q_idx] == ids[kv_idx]) & inner(b, h, q_idx - start[q_idx], kv_idx - start[kv_idx])

    return MaskMod(mask, f"document({getattr(inner, '__name__', 'inner')})")
