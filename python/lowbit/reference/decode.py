# SPDX-License-Identifier: Apache-2.0
"""The result of `decode`, and the values of a key-value cache's codes, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 32


def hadamard(size: int) -> Tensor:
    """Return the normalized Hadamard matrix of a power of two, float64 ``[size, size]``."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotate(x: Tensor) -> Tensor:
    """Rotate rows ``[..., E]``, padded with zeros to a multiple of 32, in blocks of the largest power of two that
    divides the padded size."""
    padded = pad(x.double())
    size = padded.shape[-1] & -padded.shape[-1]
    return (padded.unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2)


def pad(x: Tensor) -> Tensor:
    """Pad the last dimension with zeros to a multiple of 32."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP))


def codes_of(stored: Tensor) -> Tensor:
    """Return codes as float64 ``[..., padded E]`` from int8, or from uint8, which has 16 low and 16 high nibbles for
    every 32 elements, each plus 8."""
    if stored.dtype == torch.int8:
        return stored.double()
    groups = stored.unflatten(-1, (-1, GROUP // 2))
    return torch.cat([groups & 15, groups >> 4], -1).flatten(-2).double() - 8


def decoded(stored: Tensor, scale: Tensor) -> Tensor:
    """Return codes times their scales, float64 ``[..., padded E]``."""
    codes = codes_of(stored)
    return codes * scale.double().repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)


def decode(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, position: int = 0, window: int = 0,
    mask: Tensor | None = None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, lse and the probabilities ``[B, Hq, L, S]`` in float64. A query that sees no key gets the result 0
    and lse -inf."""
    group, length, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    at, key = torch.arange(length)[:, None] + position, torch.arange(keys)
    visible = torch.ones(length, keys, dtype=torch.bool)
    if causal:
        visible &= key <= at
    if window > 0:
        visible &= key > at - window
    scores = scores.masked_fill(~visible, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    with_sink = (
        scores if sink is None else torch.cat([scores, sink.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    )
    lse = torch.logsumexp(with_sink, -1)
    # Not exp(scores - lse): with a mask of 1e30, lse loses log(total) to rounding.
    p = torch.softmax(with_sink, -1)[..., :keys].masked_fill((lse == -math.inf)[..., None], 0.0)
    return p @ v, lse, p
