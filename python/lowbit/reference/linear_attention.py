# SPDX-License-Identifier: Apache-2.0
"""Linear attention in float64, token by token and differentiable; and the roundings that a float32 kernel may add."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

EPSILON = 1e-6
"""What is added to the sum of squares of a normalized row."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    l2norm: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, Hv, Dv] and the state [N, Hv, Dk, Dv]; arguments as those of `lowbit.gated_delta_rule`."""
    q, k, v, decay, beta = _of_heads(q, k, v, g, beta, l2norm, scale)
    spans = _spans(q.shape[1], cu_seqlens)
    shape = len(spans) if cu_seqlens is not None else q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    states = torch.zeros(shape, dtype=torch.float64) if state is None else state.double()
    outs, ends = [v.new_empty(v.shape[0], 0, *v.shape[2:])], []
    for n, (begin, end) in enumerate(spans):
        now = states[n : n + 1] if cu_seqlens is not None else states
        for t in range(begin, end):
            now = decay[:, t, :, :, None] * now
            change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], now))
            now = now + k[:, t, :, :, None] * change[:, :, None]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], now)[:, None])
        ends.append(now)
    return torch.cat(outs, 1), torch.cat([states[:0], *ends])


def roundings(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    l2norm: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how far o and the state of a float32 kernel may be off, in units of its roundoff.

    Columns of the state do not depend on each other. An error of a column is carried on by the matrix
    (I - beta k k^T) exp(g), whose norm is at most ``carried``; a token adds the roundings of sums of Dk terms, of which
    the norms are bounds.
    """
    q, k, v, decay, beta = _of_heads(q, k, v, g, beta, l2norm, scale)
    spans = _spans(q.shape[1], cu_seqlens)
    largest, norm, terms = decay.amax(-1), k.norm(dim=-1), q.shape[3] + 64
    carried = largest * (1 - beta * norm.square()).abs().clamp(min=1)
    shape = len(spans) if cu_seqlens is not None else q.shape[0], v.shape[2], v.shape[3]
    sizes = torch.zeros(shape, dtype=torch.float64) if state is None else state.double().norm(dim=-2)
    outs, ends = [v.new_empty(v.shape[0], 0, *v.shape[2:])], []
    for n, (begin, end) in enumerate(spans):
        size = sizes[n : n + 1] if cu_seqlens is not None else sizes
        error = torch.zeros_like(size)
        for t in range(begin, end):
            read = largest[:, t, :, None] * size
            written = (beta[:, t] * norm[:, t]).abs()[..., None] * (v[:, t].abs() + norm[:, t, :, None] * read)
            size, error = read + written, carried[:, t, :, None] * error + terms * (read + written)
            outs.append((q[:, t].norm(dim=-1)[..., None] * (error + terms * size))[:, None])
        ends.append(error[:, :, None].expand(-1, -1, q.shape[3], -1))
    return torch.cat(outs, 1), torch.cat([sizes[:0, :, None].expand(-1, -1, q.shape[3], -1), *ends])


def _of_heads(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, exp(g) and beta in float64 as value heads have them: q [B, T, Hv, Dk], normalized and scaled."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.double().repeat_interleave(group, 2) for x in (q, k))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    decay = g.double().exp()
    return q, k, v.double(), decay.expand(k.shape) if g.dim() == 4 else decay[..., None].expand(k.shape), beta.double()


def _spans(tokens: int, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    return [(0, tokens)] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
