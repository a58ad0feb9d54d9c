# SPDX-License-Identifier: Apache-2.0
"""Attention with its gradient, for scaled_dot_product_attention and flex_attention.

As in `linear`, the autograd Function wraps the op and is used only if a gradient is needed. It saves q, k, v, the
result (on a CPU in float32) and one log-sum-exp per row; the backward recomputes the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops import attention_formulas, batching
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import by_name, register

register()
batching.register("attention_forward")
batching.register("attention_backward")
_forward, _backward = by_name("attention_forward"), by_name("attention_backward")
_is_grad_enabled, _compiler = torch.is_grad_enabled, torch.compiler
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active

# A call is a dict of its arguments by name. autograd only sees tensors that are arguments themselves. So a Function
# takes a dict of all other arguments, with the length of each list of tensors, followed by the tensors in this order.
_TENSORS = ("q", "k", "v", "mask", "sink", "seed")
_LISTS = ("score_captured", "mask_captured", "blocks")


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
    """Return softmax(score_mod(scale * q k^T) + mask) v, the log-sum-exp of each row, and the max score of each row.

    The result and the log-sum-exp are differentiable in q, k, v, a floating mask, sink, and the floating tensors that
    score_mod captures; the max score is not differentiable. A second derivative (create_graph=True) materializes the
    scores; it is not available with score programs, a block mask or dropout. Forward mode also materializes the scores;
    it is not available with score programs or a block mask.

    Args:
        q, k, v: ``[B, Hq, L, E]``, ``[B, Hkv, S, E]``, ``[B, Hkv, S, Ev]``, all of one floating dtype; Hq is a
            multiple of Hkv.
        scale: factor of q k^T.
        causal: whether query i only attends to keys 0 to i.
        mask: bool (False masks a key) or floating (added to the score), 4-d, each size 1 or that of ``[B, Hq, L, S]``.
        dropout_p: dropout probability; the seed is drawn from torch's generator.
        score_mod, mask_mod: score programs (docs/ops/attention.md); empty for none.
        score_captured, mask_captured: the tensors that the programs read.
        blocks: kv_num_blocks, kv_indices and optionally full_kv_num_blocks, full_kv_indices of a BlockMask.
        block_size: number of queries and keys in a block.
        sink: ``[Hq]``, an additional logit per head that has no value.
        want_max_scores: whether the third result is needed.

    Returns:
        (out, lse, max score): out ``[B, Hq, L, Ev]`` in the dtype of q; lse and max score ``[B, Hq, L]`` in float32,
        or float64 for float64 inputs. Without ``want_max_scores`` the third result may be empty.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    if sink is not None:
        sink = sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    call = {
        "q": q, "k": k, "v": v, "scale": scale, "causal": causal, "mask": mask, "dropout_p": dropout_p, "seed": seed,
        "sink": sink,
        "score_mod": score_mod, "score_captured": score_captured, "mask_mod": mask_mod, "mask_captured": mask_captured,
        "blocks": blocks, "block_size": block_size, "want_max_scores": want_max_scores, "real_out": False,
    }  # fmt: skip
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        return _with_tangents(call)
    # Inside vmap, requires_grad does not show whether the wrapped tensor requires a gradient, so the Function is always
    # used. An exported program gets its gradient from the dispatcher when it runs.
    if (
        _compiler._is_exporting_flag
        or not _is_grad_enabled()
        or not (
            (not _is_dynamo_compiling() and _is_transformed())
            or q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (mask is not None and mask.requires_grad)
            or (sink is not None and sink.requires_grad)
            or any(tensor.requires_grad for tensor in score_captured)
        )
    ):
        return _forward(call)
    return _recorded(call)


def differentiated_attention_forward(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lowbit::attention_forward` with its derivative, for derivatives.py."""
    real_out = call["real_out"]
    out, lse, max_scores = (_with_tangents if forward_ad._current_level >= 0 else _recorded)(call)
    return out.to(lse.dtype) if real_out else out, lse, max_scores


def _with_tangents(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    if not (call["score_mod"] or call["mask_mod"] or call["blocks"]):
        return attention_formulas.forward(call)
    tensors = refuse_tangents("attention with score_mod, mask_mod or a block mask", _tensors(call))
    return _recorded(_joined(_without_tensors(call), tensors))


def _recorded(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Call the op in a Function, which records nothing if no gradient is needed."""
    q = call["q"]
    # With want_max_scores the call is not served by `decode`, which sums q k^T in another order than the backward: at
    # |s| = 200 the error of p = exp(s - lse) would be four times as large. real_out requests the result in float32. The
    # gradient of the scores is p (dp - sum of grad_out * out); if one score is far above the others, this difference
    # would consist only of the result's rounding error.
    # On a GPU neither is needed: decode sums in the order of the tiles, and every library's results have 16 bits.
    call["want_max_scores"] = call["real_out"] = not q.is_cuda
    transformed = _is_dynamo_compiling() or _is_transformed()
    function = _TransformedAttention if transformed else _Attention
    out, lse, max_scores = function.apply(_without_tensors(call), *_tensors(call))
    return out if out.dtype == q.dtype else out.to(q.dtype), lse, max_scores


def _without_tensors(call: dict[str, Any]) -> dict[str, Any]:
    return {name: len(value) if name in _LISTS else value for name, value in call.items() if name not in _TENSORS}


def _tensors(call: dict[str, Any]) -> list[Tensor | None]:
    tensors = [call[name] for name in _TENSORS]
    for name in _LISTS:
        tensors += call[name]
    return tensors


def _joined(others: dict[str, Any], tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the call for the results of `_without_tensors` and `_tensors`. Any other values may replace the
    tensors."""
    call = others | dict(zip(_TENSORS, tensors, strict=False))
    begin = len(_TENSORS)
    for name in _LISTS:
        call[name] = tensors[begin : begin + others[name]]
        begin += others[name]
    return call


class _TransformedAttention(torch.autograd.Function):
    """Autograd Function of the op, for Dynamo and torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(others: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(_joined(others, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.others, *tensors = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        call, needs = _joined(ctx.others, tensors), _joined(ctx.others, ctx.needs_input_grad[1:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        twice = torch.is_grad_enabled()  # with create_graph=True, and always in torch.func
        if twice and not (call["score_mod"] or call["mask_mod"] or call["blocks"] or call["dropout_p"] > 0):
            nothing = {name: [None] * len(call[name]) for name in _LISTS}
            grads = nothing | attention_formulas.gradients(call, needs, grad_out, grad_lse)
        else:
            wanted = {"mask_needs": needs["mask"], "sink_needs": needs["sink"]}
            wanted["score_captured_needs"] = list(needs["score_captured"])
            function = _Once.apply if twice else _gradients
            grads = _by_argument(call, needs, function(ctx.others | wanted, out, lse, grad_out, grad_lse, *tensors))
        return None, *_tensors(grads)


def _gradients(
    others: dict[str, Any], out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    results = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
    return tuple(_backward(_joined(others, tensors) | results))


def _by_argument(call: dict[str, Any], needs: dict[str, Any], grads: Iterable[Tensor]) -> dict[str, Any]:
    """Return the op's flat list of gradients as a dict by argument."""
    rest = iter(grads)
    of = {"q": next(rest), "k": next(rest), "v": next(rest), "seed": None}
    of["mask"] = next(rest).to(call["mask"].dtype) if needs["mask"] else None
    of["sink"] = next(rest) if needs["sink"] else None
    of |= {name: [None] * len(call[name]) for name in _LISTS}
    return of | {"score_captured": [next(rest) if needed else None for needed in needs["score_captured"]]}


class _Once(torch.autograd.Function):
    """The backward as a Function without a derivative. ``create_graph=True`` is allowed; only computing the second
    derivative raises an error."""

    generate_vmap_rule = True
    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            "attention: a second derivative must be without score_mod, mask_mod, block mask and dropout"
        )


class _Attention(torch.autograd.Function):
    """Autograd Function of the op for eager mode, without `setup_context`, which costs torch a slow binding of the
    arguments in every call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _TransformedAttention.forward(*inputs)
        _TransformedAttention.setup_context(ctx, inputs, output)
        return output

    backward = _TransformedAttention.backward
