# SPDX-License-Identifier: Apache-2.0
"""The state space dual in float64, token by token and differentiable; and the roundings that a float32 kernel may add."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

EXP, SOFTPLUS = 6, 6
"""Roundings of exp and softplus, relative to their values."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P] and the state [N, H, P, S]; arguments as those of `lowbit.ssd`."""
    x, B, C = _of_heads(x, B, C)
    speed = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    delta = (speed.logaddexp(torch.zeros_like(speed)) if softplus else speed).clamp(*dt_limit)
    decay = (delta * A.double()).exp()
    spans, states = _spans_and_states(x, B, state, cu_seqlens)
    outs, ends = [x[:, :0]], [states[:0]]
    for n, (begin, end) in enumerate(spans):
        now = states if cu_seqlens is None else states[n : n + 1]
        for t in range(begin, end):
            now = decay[:, t, :, None, None] * now + (delta[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            outs.append((now @ C[:, t, :, :, None])[..., 0][:, None])
        ends.append(now)
    y = torch.cat(outs, 1)
    return y if D is None else y + D.double()[:, None] * x, torch.cat(ends)


def roundings(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how far y and the state of a float32 kernel may be off, in units of its roundoff.

    An element of the state is a sum over tokens, of which each adds the errors of its decay and of its delta. These are
    those of exp and softplus, and of their arguments.
    """
    x, B, C = (tensor.abs() for tensor in _of_heads(x, B, C))
    speed = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    moved = speed.abs() * (speed.sigmoid() if softplus else 1)
    delta = (speed.logaddexp(torch.zeros_like(speed)) if softplus else speed).clamp(*dt_limit)
    of_delta = moved + SOFTPLUS * delta
    decay = (delta * A.double()).exp()
    of_decay = A.double().abs() * (of_delta + delta) + EXP
    spans, states = _spans_and_states(x, B, None if state is None else state.abs(), cu_seqlens)
    outs, ends = [x[:, :0]], [states[:0]]
    for n, (begin, end) in enumerate(spans):
        size = states if cu_seqlens is None else states[n : n + 1]
        error = torch.zeros_like(size)
        for t in range(begin, end):
            product = x[:, t, :, :, None] * B[:, t, :, None]
            old = decay[:, t, :, None, None] * size
            size = old + delta[:, t, :, None, None] * product
            error = decay[:, t, :, None, None] * error + of_decay[:, t, :, None, None] * old
            error = error + of_delta[:, t, :, None, None] * product + 8 * size
            terms = error + (B.shape[-1] + 64) * size
            outs.append((terms @ C[:, t, :, :, None])[..., 0][:, None])
        ends.append(error)
    y = torch.cat(outs, 1)
    return y if D is None else y + 64 * D.double().abs()[:, None] * x, torch.cat(ends)


def _of_heads(x: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, and B and C as heads have them, in float64."""
    group = x.shape[2] // B.shape[2]
    return x.double(), *(tensor.double().repeat_interleave(group, 2) for tensor in (B, C))


def _spans_and_states(
    x: Tensor, B: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[list[tuple[int, int]], Tensor]:
    spans = [(0, x.shape[1])] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
    shape = x.shape[0] if cu_seqlens is None else len(spans), *x.shape[2:], B.shape[-1]
    return spans, torch.zeros(shape, dtype=torch.float64) if state is None else state.double()
