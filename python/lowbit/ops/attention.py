# SPDX-License-Identifier: Apache-2.0
"""Attention with its gradient: what scaled_dot_product_attention and flex_attention are made of.

As for `linear`, the Function stands outside the op and is used only when a gradient is wanted. It keeps q, k, v, the result in
float32 and one log-sum-exp per row; the scores are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.ops import batching
from lowbit.ops.registration import register

register()
batching.register("attention_forward")
batching.register("attention_backward")
_forward_op = torch.ops.lowbit.attention_forward.default
_backward_op = torch.ops.lowbit.attention_backward.default
_forward_function = _forward_op._op  # what an OpOverload calls: 0.2 us less, but unknown to Dynamo
_is_grad_enabled = torch.is_grad_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active

# Positions among the arguments of the op; the Function takes score_captured behind all others.
_MASK, _SINK, _FIXED = 5, 14, 17


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: Sequence[int] = (),
    score_captured: Sequence[Tensor] = (),
    mask_mod: Sequence[int] = (),
    mask_captured: Sequence[Tensor] = (),
    blocks: Sequence[Tensor] = (),
    block_size: tuple[int, int] = (128, 128),
    sink: Tensor | None = None,
    want_max_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(score_mod(scale * q k^T) + mask) v, the log-sum-exp of each row, and its largest score.

    Differentiable in q, k, v, a floating mask, sink and the floating tensors that score_mod captures, through the result and the
    log-sum-exp. The largest score is not differentiable. A second derivative (create_graph=True) materializes the scores, and is
    not there with programs, a block mask or dropout.

    Args:
        q, k, v: ``[B, Hq, L, E]``, ``[B, Hkv, S, E]``, ``[B, Hkv, S, Ev]``, one floating dtype; Hq is a multiple of Hkv.
        scale: factor of q k^T.
        causal: query i sees keys 0 to i.
        mask: bool (False: not seen) or floating (added), 4-d, each size 1 or that of ``[B, Hq, L, S]``.
        dropout_p: probability with which each probability is dropped; the seed is drawn from torch's generator.
        score_mod, mask_mod: score programs (docs/ops/attention.md); empty for none.
        score_captured, mask_captured: the tensors that they read.
        blocks: kv_num_blocks, kv_indices and perhaps full_kv_num_blocks, full_kv_indices of a BlockMask.
        block_size: queries and keys of a block.
        sink: ``[Hq]``, a logit without a value.
        want_max_scores: fill the third result, whether a gradient is wanted or not.

    Returns:
        (out ``[B, Hq, L, Ev]`` in the dtype of q, lse and largest score ``[B, Hq, L]`` in float32, float64 for float64 inputs;
        without ``want_max_scores`` the third may be empty).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it.
    """
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    if sink is not None:
        sink = sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    compiling = _is_dynamo_compiling()
    transformed = not compiling and _is_transformed()
    if _is_grad_enabled() and (
        transformed  # inside vmap a tensor does not say that the one around it requires a gradient
        or q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sink is not None and sink.requires_grad)
        or any(tensor.requires_grad for tensor in score_captured)
    ):
        function = _TransformedAttention if compiling or transformed else _Attention
        # want_max_scores keeps the call from `decode`, which sums q k^T in another order than the backward: where |s| = 200, p = exp(s - lse)
        # would be off by four times as much. The result in float32: a gradient of the scores is p (dp - sum of grad_out * out), and where one score is
        # far above the others that difference is nothing but the rounding of the result.
        out, lse, max_scores = function.apply(
            q, k, v, scale, causal, mask, dropout_p, seed, score_mod, len(score_captured), mask_mod, mask_captured, blocks, block_size,
            sink, True, True, *score_captured,
        )  # fmt: skip
        return out if out.dtype == q.dtype else out.to(q.dtype), lse, max_scores
    return (_forward_op if compiling else _forward_function)(
        q, k, v, scale, causal, mask, dropout_p, seed, score_mod, score_captured, mask_mod, mask_captured, blocks, block_size, sink,
        want_max_scores,
    )  # fmt: skip


class _TransformedAttention(torch.autograd.Function):
    """Captured tensors come last, one argument each, so that autograd sees them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward_op(*args[:9], args[_FIXED:], *args[10:_FIXED])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, scale, causal, mask, dropout_p, seed, score_mod, captured, mask_mod, mask_captured, blocks, block_size, sink, *_ = inputs[
            :_FIXED
        ]
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        ctx.numbers = scale, causal, dropout_p, score_mod, mask_mod, block_size
        ctx.counts = captured, len(mask_captured), len(blocks)
        ctx.save_for_backward(q, k, v, out, lse, mask, seed, sink, *inputs[_FIXED:], *mask_captured, *blocks)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask, seed, sink, *rest = ctx.saved_tensors
        scale, causal, dropout_p, score_mod, mask_mod, block_size = ctx.numbers
        n, m, _ = ctx.counts
        score_captured, mask_captured, blocks = rest[:n], rest[n : n + m], rest[n + m :]
        needs = ctx.needs_input_grad
        captured_needs = list(needs[_FIXED:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        twice = torch.is_grad_enabled()  # create_graph=True, and always in torch.func
        if twice and not (score_mod or mask_mod or blocks or dropout_p > 0):
            grad_q, grad_k, grad_v, grad_mask, grad_sink = _twice_differentiable(
                (q, k, v, mask, sink), needs, scale, causal, (grad_out, grad_lse)
            )
            return grad_q, grad_k, grad_v, None, None, grad_mask, *(None,) * (_SINK - _MASK - 1), grad_sink, None, None
        grads = (_Once.apply if twice else _backward)(
            q, k, v, out, lse, grad_out, grad_lse, scale, causal, mask, dropout_p, seed, score_mod, captured_needs, mask_mod, mask_captured,
            blocks, block_size, sink, needs[_MASK], needs[_SINK], *score_captured,
        )  # fmt: skip
        others = iter(grads[3:])
        grad_mask = next(others).to(mask.dtype) if needs[_MASK] else None
        grad_sink = next(others) if needs[_SINK] else None
        captured = (next(others) if needed else None for needed in captured_needs)
        return *grads[:3], None, None, grad_mask, *(None,) * (_SINK - _MASK - 1), grad_sink, None, None, *captured


def _backward(*args: Any) -> tuple[Tensor, ...]:
    return tuple(_backward_op(*args[:13], args[21:], *args[13:21]))


class _Once(torch.autograd.Function):
    """The backward as a function without a derivative of its own. ``create_graph=True`` alone is fine; an error comes only when that
    second derivative is computed."""

    generate_vmap_rule = True
    forward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("attention: no second derivative with score_mod, mask_mod, a block mask or dropout")


class _Attention(torch.autograd.Function):
    """The same in one part: torch binds the arguments of a `setup_context` by their signature, 20 us a call. torch.func and Dynamo need it."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward_function(*args[:9], args[_FIXED:], *args[10:_FIXED])
        _TransformedAttention.setup_context(ctx, args, output)
        return output

    backward = _TransformedAttention.backward


def _twice_differentiable(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    needs: Sequence[bool],
    scale: float,
    causal: bool,
    grads: tuple[Tensor, Tensor | None],
) -> list[Tensor | None]:
    """The gradients of q, k, v, mask and sink by torch's own ops, from the whole matrix of scores; see the formulas of the kernel."""
    q, k, v, mask, sink = inputs
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = (k.shape[1], q.shape[1] // max(1, k.shape[1]))
    wide_k, wide_v = (x.to(real).repeat_interleave(groups[1], 1) for x in (k, v))
    scores = q.to(real) @ wide_k.transpose(-1, -2) * scale
    visible = None
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else mask & visible
    elif mask is not None:
        scores = scores + mask.to(real)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)  # a row that sees nothing must not make nan
    p, p_sink = (p, None) if sink is None else (p[..., :-1], p[..., -1:])

    grad_out, grad_lse = (None if grad is None else grad.to(real) for grad in grads)
    grad_p = grad_out @ wide_v.transpose(-1, -2)
    d = (p * grad_p).sum(-1, keepdim=True)
    if grad_lse is not None:
        d = d - grad_lse[..., None]
    grad_s = p * (grad_p - d)
    grad_q = (grad_s @ wide_k * scale).to(q.dtype)
    grad_k = (grad_s.transpose(-1, -2) @ q.to(real) * scale).unflatten(1, groups).sum(2).to(k.dtype)
    grad_v = (p.transpose(-1, -2) @ grad_out).unflatten(1, groups).sum(2).to(v.dtype)
    grad_mask = grad_s.sum_to_size(mask.shape).to(mask.dtype) if mask is not None and needs[_MASK] else None
    grad_sink = -(p_sink * d).sum((0, 2, 3)) if p_sink is not None and needs[_SINK] else None
    return [grad_q, grad_k, grad_v, grad_mask, grad_sink]
