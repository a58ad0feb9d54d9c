# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of attention, decoding and the quantized cache: shape, dtype and strides of the results of
csrc/torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def forward(q: Tensor, v: Tensor, want_max_scores: bool, real_out: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and max score."""
    shape, real = tuple(q.shape[:3]), torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(shape, dtype=real)
    return (
        _ordered(q, (*shape, v.shape[3]), real if real_out else q.dtype),
        lse,
        lse.new_empty(shape if want_max_scores else (0,)),
    )


def backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, sink: Tensor | None,
    score_captured: Sequence[Tensor],
    score_captured_needs: Sequence[bool], mask_needs: bool, sink_needs: bool, **_: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, followed by those of mask, sink and captured tensors that are needed."""
    grads = [_ordered(tensor, tensor.shape) for tensor in (q, k, v)]
    if mask_needs:
        grads.append(lse.new_empty(mask.shape))
    if sink_needs:
        grads.append(sink.new_empty(sink.shape))
    wanted = zip(score_captured, score_captured_needs, strict=False)
    return grads + [tensor.new_empty(tensor.shape) for tensor, needed in wanted if needed]


def decode(q: Tensor, v_columns: int, **_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v_columns))


def writes(**_: Any) -> None:
    """Return nothing, since the results are arguments."""


def _ordered(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return a new dense 4-d tensor whose strides have the order of those of ``like``, with the last dimension
    innermost."""
    strides = like.stride()
    if 0 in strides[:3] or (strides[3] != 1 and like.shape[3] > 1):
        return like.new_empty(shape, dtype=dtype)
    order = sorted(range(3), key=lambda i: -strides[i])
    return like.new_empty([*(shape[i] for i in order), shape[3]], dtype=dtype).permute(
        [*(order.index(i) for i in range(3)), 3]
    )
