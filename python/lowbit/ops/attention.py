# SPDX-License-Identifier: Apache-2.0
"""Attention with its gradient: what scaled_dot_product_attention and flex_attention are made of.

As for `linear`, the Function stands outside the op and is used only when a gradient is wanted. It keeps q, k, v, the result and
one log-sum-exp per row; the scores are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.registration import register

register()
_forward_op = torch.ops.lowbit.attention_forward.default
_backward_op = torch.ops.lowbit.attention_backward.default
_forward_function = _forward_op._op  # what an OpOverload calls: 0.2 us less, but unknown to Dynamo
_is_grad_enabled = torch.is_grad_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active

# Positions among the arguments of the op; the Function takes score_captured behind all others.
_MASK, _SINK, _FIXED = 5, 14, 16


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
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64) if dropout_p > 0 else None
    if sink is not None:
        sink = sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    compiling = _is_dynamo_compiling()
    if _is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sink is not None and sink.requires_grad)
        or any(tensor.requires_grad for tensor in score_captured)
    ):
        function = _TransformedAttention if compiling or _is_transformed() else _Attention
        # want_max_scores keeps the call from `decode`, which sums q k^T in another order than the backward: where |s| = 200, p = exp(s - lse)
        # would be off by four times as much.
        return function.apply(
            q, k, v, scale, causal, mask, dropout_p, seed, score_mod, len(score_captured), mask_mod, mask_captured, blocks, block_size,
            sink, True, *score_captured,
        )  # fmt: skip
    return (_forward_op if compiling else _forward_function)(
        q, k, v, scale, causal, mask, dropout_p, seed, score_mod, score_captured, mask_mod, mask_captured, blocks, block_size, sink,
        want_max_scores,
    )  # fmt: skip


class _TransformedAttention(torch.autograd.Function):
    """Captured tensors come last, one argument each, so that autograd sees them."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward_op(*args[:9], args[_FIXED:], *args[10:_FIXED])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, scale, causal, mask, dropout_p, seed, score_mod, captured, mask_mod, mask_captured, blocks, block_size, sink, _ = inputs[
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
        if torch.is_grad_enabled():  # create_graph=True
            if score_mod or mask_mod or blocks or dropout_p > 0:
                raise NotImplementedError("attention: no second derivative with score_mod, mask_mod, a block mask or dropout")
            grad_q, grad_k, grad_v, grad_mask, grad_sink = _twice_differentiable(
                (q, k, v, mask, sink), needs, scale, causal, (grad_out, grad_lse)
            )
            return grad_q, grad_k, grad_v, None, None, grad_mask, *(None,) * (_SINK - _MASK - 1), grad_sink, None
        grads = _backward_op(
            q, k, v, out, lse, grad_out, grad_lse, scale, causal, mask, dropout_p, seed, score_mod, score_captured, captured_needs,
            mask_mod, mask_captured, blocks, block_size, sink, needs[_MASK], needs[_SINK],
        )  # fmt: skip
        others = iter(grads[3:])
        grad_mask = next(others).to(mask.dtype) if needs[_MASK] else None
        grad_sink = next(others) if needs[_SINK] else None
        captured = (next(others) if needed else None for needed in captured_needs)
        return *grads[:3], None, None, grad_mask, *(None,) * (_SINK - _MASK - 1), grad_sink, None, *captured


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
    """The gradients of q, k, v, mask and sink as torch's own graph, from the whole matrix of scores."""
    inputs = tuple(None if x is None else x.view_as(x) for x in inputs)  # one tensor may come as q, k and v: a gradient for each
    q, k, v, mask, sink = inputs
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.to(real).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(real) @ wide_k.transpose(-1, -2) * scale
    visible = None
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        scores = scores + mask.to(real)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    columns = scores if sink is None else torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = (columns == -torch.inf).all(-1)
    lse = columns.masked_fill(empty[..., None], 0.0).logsumexp(-1)  # a row that sees nothing must not make nan
    p = (scores - lse[..., None]).exp().masked_fill(empty[..., None], 0.0)
    outputs = [(p @ wide_v).to(q.dtype), lse.masked_fill(empty, -torch.inf)]
    wanted = [x for x, needed in zip(inputs, (*needs[:3], needs[_MASK], needs[_SINK]), strict=True) if needed and x is not None]
    given = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    found = iter(torch.autograd.grad([o for o, _ in given], wanted, [g for _, g in given], create_graph=True, allow_unused=True))
    return [next(found) if any(x is y for y in wanted) else None for x in inputs]
