# SPDX-License-Identifier: Apache-2.0
"""The selective scan in float64, token by token and differentiable; and the roundings that a float32 kernel may add."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.reference.ssd import EXP, SOFTPLUS

SILU = 10
"""Roundings of silu, relative to its value."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, D] and the state [N, D, S]; arguments as those of `lowbit.selective_scan`."""
    x, (B, C) = x.double(), (_of_channels(tensor, x.shape[2]) for tensor in (B, C))
    speed = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    delta = (speed.logaddexp(torch.zeros_like(speed)) if softplus else speed).clamp(*dt_limit)
    outs, ends = [x[:, :0]], []
    for (begin, end), now in _spans_and_states(x, A, state, cu_seqlens):
        for t in range(begin, end):
            now = (delta[:, t, :, None] * A.double()).exp() * now + (delta[:, t] * x[:, t])[..., None] * B[:, t]
            outs.append((now * C[:, t]).sum(-1)[:, None])
        ends.append(now)
    y = torch.cat(outs, 1)
    y = y if D is None else y + D.double() * x
    return y if z is None else y * functional.silu(z.double()), _joined(ends, A)


def roundings(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how far y and the state of a float32 kernel may be off, in units of its roundoff.

    A number of the state is a sum over tokens, of which each adds the errors of its decay and of its delta. These are
    those of exp and softplus, and of their arguments; that of exp has a rounding of log2(e) A and one of its product.
    """
    x, (B, C) = x.double().abs(), (_of_channels(tensor, x.shape[2]).abs() for tensor in (B, C))
    speed = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    moved = speed.abs() * (speed.sigmoid() if softplus else 1)
    delta = (speed.logaddexp(torch.zeros_like(speed)) if softplus else speed).clamp(*dt_limit)
    of_delta = moved + SOFTPLUS * delta
    terms = A.shape[-1] + SILU + 8
    outs, ends = [x[:, :0]], []
    for (begin, end), size in _spans_and_states(x, A, None if state is None else state.abs(), cu_seqlens):
        error = torch.zeros_like(size)
        for t in range(begin, end):
            product = x[:, t, :, None] * B[:, t]
            decay = (delta[:, t, :, None] * A.double()).exp()
            of_decay = A.double().abs() * (of_delta + 2 * delta)[:, t, :, None] + EXP
            old = decay * size
            size = old + delta[:, t, :, None] * product
            error = decay * error + of_decay * old + of_delta[:, t, :, None] * product + 8 * size
            outs.append(((error + terms * size) * C[:, t]).sum(-1)[:, None])
        ends.append(error)
    y = torch.cat(outs, 1)
    y = y if D is None else y + terms * D.double().abs() * x
    return y if z is None else y * functional.silu(z.double()).abs(), _joined(ends, A)


def _of_channels(tensor: Tensor, channels: int) -> Tensor:
    """Return B or C as each channel has it, ``[B, T, D, S]`` or, for all alike, ``[B, T, 1, S]``, in float64."""
    tensor = tensor.double().unsqueeze(2) if tensor.dim() == 3 else tensor.double()
    groups = tensor.shape[2]
    return tensor if groups in (1, channels) else tensor.repeat_interleave(channels // groups, 2)


def _spans_and_states(
    x: Tensor, A: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> list[tuple[tuple[int, int], Tensor]]:
    """Return the tokens of each sequence, or of all rows, with the states before them."""
    spans = [(0, x.shape[1])] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
    shape = x.shape[0] if cu_seqlens is None else len(spans), *A.shape
    states = torch.zeros(shape, dtype=torch.float64) if state is None else state.double()
    return [(span, states if cu_seqlens is None else states[n : n + 1]) for n, span in enumerate(spans)]


def _joined(ends: list[Tensor], A: Tensor) -> Tensor:
    return torch.cat(ends) if ends else torch.zeros(0, *A.shape, dtype=torch.float64)
