# SPDX-License-Identifier: Apache-2.0
"""Attention in float64, with all scores at once: the result of flex_attention.

scores = score_mod(scale * q k^T); -inf where mask_mod is False; softmax over k (and the sink, a column without a
value); times v.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out ``[B, Hq, L, Ev]``, lse ``[B, Hq, L]``, max score ``[B, Hq, L]``), float64 and differentiable.

    Args:
        q, k, v: ``[B, Hq, L, E]``, ``[B or 1, Hkv, S, E]``, ``[B or 1, Hkv, S, Ev]``, any float dtype.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, elementwise on tensors ``[B, Hq, L, S]``.
        mask_mod: (b, h, q_idx, kv_idx) -> bool.
        scale: the factor of the scores, by default 1 / sqrt(E).
        sink: ``[Hq]``.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    indices = torch.meshgrid(*(torch.arange(size, dtype=torch.int32) for size in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*indices), scores, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(scores - shift)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.double()[:, None, None] - shift)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -torch.inf, torch.log(total) + shift)
    return (weights / total) @ v, lse.squeeze(-1), largest.squeeze(-1)
