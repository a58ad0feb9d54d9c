# SPDX-License-Identifier: Apache-2.0
"""Attention with a mod that no score program can express: torch evaluates it with vmap, 128 queries at a time, forward
and backward.

It is slow but correct. Its memory grows linearly with the length, not quadratically: each block of queries is
recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowbit.score.indexing import GetitemAsAten

_QUERIES = 128


def attention_through_torch(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None,
    scale: float,
    classes: Tensor | None, block_size: tuple[int, int], dropout_p: float, sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, lse, max score), like lowbit.ops.attention.attention.

    Args:
        q, k, v: the tensors of the op.
        score_mod, mask_mod: the functions or None.
        scale: the factor of the scores.
        classes: whether each block is empty, partial or full, see block_mask.py; None to call mask_mod everywhere.
        block_size: the numbers of queries and keys in a block.
        dropout_p: the dropout probability.
        sink: a logit per head, or None.
    """
    group = q.shape[1] // max(1, k.shape[1])
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (tensor.to(real).repeat_interleave(group, 1) for tensor in (k, v))

    def modified(start: int, scores: Tensor) -> Tensor:
        """Return the scores of queries from ``start`` on after score_mod, with -inf for keys that are not seen."""
        indices = [torch.arange(size, dtype=torch.int32, device=q.device) for size in scores.shape]
        indices[2] += start
        if score_mod is not None:
            scores = on_every_score(score_mod, 1)(scores, *indices).to(real)
        seen = scores.new_ones((), dtype=torch.bool)
        if mask_mod is not None:
            seen = on_every_score(mask_mod, 0)(*indices)
        if classes is not None:
            rows, columns = indices[2].long() // block_size[0], indices[3].long() // block_size[1]
            cells = classes[:, :, rows][..., columns]
            seen = (cells == 2) | (cells == 1) & seen
        return torch.where(seen, scores, -torch.inf)

    def block(start: int, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = queries.to(real) @ keys.transpose(-2, -1) * scale
        if scores.numel():  # vmap does not accept empty dimensions
            scores = modified(start, scores)
        largest = (
            scores.detach().amax(-1, keepdim=True)
            if k.shape[2]
            else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        )
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        weights = torch.exp(scores - shift)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink.to(real)[:, None, None] - shift)
        nothing = total == 0
        total = torch.where(nothing, 1.0, total)
        lse = torch.where(nothing, -torch.inf, torch.log(total) + shift)
        weights = weights / total
        weights = torch.dropout(weights, dropout_p, train=True) if dropout_p else weights
        return (weights @ values).to(q.dtype), lse.squeeze(-1), largest.squeeze(-1)

    parts = [
        checkpoint(block, start, q[:, :, start : start + _QUERIES], use_reentrant=False)
        for start in range(0, q.shape[2], _QUERIES)
    ] or [block(0, q)]
    out, lse, largest = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out, lse, largest.detach()


def on_every_score(mod: Callable[..., Any], scores: int) -> Callable[..., Tensor]:
    """Return the mod mapped by vmap over ``[B, H, Q, KV]``: ``scores`` is 1 for a score_mod, which also gets scores,
    and 0 for a mask_mod."""
    mapped = mod
    for dim in (3, 2, 1, 0):
        mapped = torch.vmap(mapped, in_dims=(0,) * scores + tuple(0 if dim == i else None for i in range(4)))

    def run(*arguments: Tensor) -> Tensor:
        with GetitemAsAten():
            return mapped(*arguments)

    return run
