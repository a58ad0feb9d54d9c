# SPDX-License-Identifier: Apache-2.0
"""The causal convolution over time in float64, differentiable; and the roundings that a float32 kernel may add."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

SILU = 10
"""Roundings of silu, relative to its value, and of its derivative, absolute."""
SLOPE, CURVATURE = 1.1, 0.5
"""Bounds on the first and second derivative of silu."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, D] and the state [N, D, S]; arguments as those of `lowbit.causal_conv1d`."""
    sums, states = sums_and_states(x, weight, bias, state, cu_seqlens)
    return torch.nn.functional.silu(sums) if activation else sums, states


def sums_and_states(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what the activation is applied to [B, T, D], and the states [N, D, S]."""
    x, weight, taps = x.double(), weight.double(), weight.shape[1]
    packed = cu_seqlens is not None
    spans = list(pairwise(cu_seqlens.tolist())) if packed else [(0, x.shape[1])]
    if state is None:
        state = x.new_zeros(len(spans) if packed else x.shape[0], x.shape[2], taps - 1)
    state, kept = state.double(), state.shape[2]
    sums, states = [x[:, :0]], [state[:0]]
    for n, (begin, end) in enumerate(spans):
        inputs = torch.cat([state[n : n + 1] if packed else state, x[:, begin:end].mT], -1)  # [B, D, S + T]
        if begin < end:
            windows = inputs[..., kept - (taps - 1) :].unfold(-1, taps, 1)  # [B, D, T, K]
            total = (windows * weight[:, None]).sum(-1)
            sums.append((total if bias is None else total + bias.double()[:, None]).mT)
        states.append(inputs[..., inputs.shape[-1] - kept :])
    return torch.cat(sums, 1), torch.cat(states)


def roundings(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return how far y of a float32 kernel may be off, in units of its roundoff."""
    error = (weight.shape[1] + 1) * _sizes(x, weight, bias, state, cu_seqlens)
    if not activation:
        return error
    y, _ = causal_conv1d(x, weight, bias, state, activation=activation, cu_seqlens=cu_seqlens)
    return SLOPE * error + SILU * y.abs()


def roundings_of_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    grad_y: Tensor,
    grad_state: Tensor,
) -> dict[str, Tensor]:
    """Return the same of the gradients of x, weight, bias and state: as the convolution is linear, they are gradients of
    the convolution of sizes, from the errors of grad_y f'(sums). Sums over time are those of 16 tokens each, added."""
    taps, tokens = weight.shape[1], x.shape[0] * x.shape[1]
    error = grad_y.double().abs() * SLOPE * (SILU + taps + 2 + 16 + tokens / 16)
    if activation:
        sizes = _sizes(x, weight, bias, state, cu_seqlens)
        error = error + grad_y.double().abs() * CURVATURE * (taps + 1) * sizes
    given = {"x": x, "weight": weight, "bias": bias, "state": state}
    leaves = {
        name: tensor.detach().double().abs().requires_grad_() for name, tensor in given.items() if tensor is not None
    }
    results = causal_conv1d(**leaves, cu_seqlens=cu_seqlens)
    grads = torch.autograd.grad(
        results, list(leaves.values()), [error, grad_state.double().abs()], materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the sum of the sizes of the terms of each result."""
    sizes = [None if tensor is None else tensor.abs() for tensor in (x, weight, bias, state)]
    return sums_and_states(*sizes, cu_seqlens)[0]
