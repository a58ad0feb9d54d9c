# SPDX-License-Identifier: Apache-2.0
"""The ops `lowbit::attention_forward` and `lowbit::attention_backward` as torch sees them: schemas, fake kernels, and CPU kernels for
where C++ could not register its own (csrc/torch/attention.cpp: the same, in less time).

Everything about a call is an argument of its own (a score program is a list of integers), so that a graph that holds the op
holds nothing else. The random numbers of dropout come from `seed`, a tensor: tracing never asks for its value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit import _C

_CALL = "float scale, bool causal, Tensor? mask, float dropout_p, Tensor? seed"
_PROGRAMS = "int[] mask_mod, Tensor[] mask_captured, Tensor[] blocks, int[] block_size, Tensor? sink"
SCHEMAS = {
    "attention_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_CALL}, int[] score_mod, Tensor[] score_captured, {_PROGRAMS}, bool want_max_scores=False, bool real_out=False) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "attention_backward": (
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, {_CALL}, int[] score_mod, "
        f"Tensor[] score_captured, bool[] score_captured_needs, {_PROGRAMS}, bool mask_needs, bool sink_needs) -> Tensor[]"
    ),
}


def forward(q, k, v, scale, causal, mask, dropout_p, seed, score_mod, score_captured, mask_mod, mask_captured, blocks, block_size,
            sink, want_max_scores=False, real_out=False):  # fmt: skip
    out, lse, max_scores = _results(q, v, want_max_scores, real_out)
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    _C.attention_forward(
        *map(dense, (q, k, v)), out, lse, max_scores if want_max_scores else None, scale, causal, mask, dropout_p, _number(seed), score_mod,
        score_captured, mask_mod, mask_captured, blocks, tuple(block_size), sink,
    )  # fmt: skip
    return out, lse, max_scores


def forward_fake(q, k, v, scale, causal, mask, dropout_p, seed, score_mod, score_captured, mask_mod, mask_captured, blocks, block_size,
                 sink, want_max_scores=False, real_out=False):  # fmt: skip
    return _results(q, v, want_max_scores, real_out)


def _results(q: Tensor, v: Tensor, want_max_scores: bool, real_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and largest score, not yet written."""
    shape, real = tuple(q.shape[:3]), torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(shape, dtype=real)
    return _ordered(q, (*shape, v.shape[3]), real if real_out else q.dtype), lse, lse.new_empty(shape if want_max_scores else (0,))


def backward(q, k, v, out, lse, grad_out, grad_lse, scale, causal, mask, dropout_p, seed, score_mod, score_captured,
             score_captured_needs, mask_mod, mask_captured, blocks, block_size, sink, mask_needs, sink_needs):  # fmt: skip
    grads = _gradients(q, k, v, lse, mask if mask_needs else None, sink if sink_needs else None, score_captured, score_captured_needs)
    rest = iter(grads[3:])
    grad_mask, grad_sink = next(rest) if mask_needs else None, next(rest) if sink_needs else None
    captured_grads = [next(rest) if needed else None for needed in score_captured_needs]
    shape = (*q.shape[:3], k.shape[2])
    _C.attention_backward(
        *map(dense, (q, k, v, out)), lse, dense(grad_out), None if grad_lse is None else grad_lse.contiguous(), *grads[:3], scale,
        causal, None if mask is None else mask.expand(shape), dropout_p, _number(seed), score_mod, score_captured,
        captured_grads if any(score_captured_needs) else [], mask_mod, mask_captured, blocks, tuple(block_size), sink,
        None if grad_mask is None else grad_mask.expand(shape), grad_sink,
    )  # fmt: skip
    return grads


def backward_fake(q, k, v, out, lse, grad_out, grad_lse, scale, causal, mask, dropout_p, seed, score_mod, score_captured,
                  score_captured_needs, mask_mod, mask_captured, blocks, block_size, sink, mask_needs, sink_needs):  # fmt: skip
    return _gradients(q, k, v, lse, mask if mask_needs else None, sink if sink_needs else None, score_captured, score_captured_needs)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, sink: Tensor | None, captured: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """Those of q, k, v, then of mask, sink and captured tensors as far as they are wanted; not yet written, but for the mask's."""
    grads = [_ordered(tensor, tensor.shape) for tensor in (q, k, v)]
    if mask is not None:
        grads.append(lse.new_zeros(mask.shape))  # the kernel adds to it
    if sink is not None:
        grads.append(sink.new_empty(sink.shape))
    grads += [tensor.new_empty(tensor.shape) for tensor, needed in zip(captured, needs, strict=False) if needed]
    return grads


def _ordered(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A new dense tensor, 4-d, in the order of the strides of ``like``, the last dimension innermost."""
    strides = like.stride()
    if 0 in strides[:3] or (strides[3] != 1 and like.shape[3] > 1):
        return like.new_empty(shape, dtype=dtype)
    order = sorted(range(3), key=lambda i: -strides[i])
    return like.new_empty([*(shape[i] for i in order), shape[3]], dtype=dtype).permute([*(order.index(i) for i in range(3)), 3])


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that is dense in its last dimension."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed) & (2**64 - 1)


OPS = {
    name: (SCHEMAS[name], kernel, fake)
    for name, kernel, fake in (("attention_forward", forward, forward_fake), ("attention_backward", backward, backward_fake))
}
