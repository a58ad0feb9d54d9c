# SPDX-License-Identifier: Apache-2.0
"""Attention with its gradient, for scaled_dot_product_attention and flex_attention.

As for `linear`, the Function stands outside of the op and is used only when a gradient is wanted. It keeps q, k, v, the
result (on a CPU in float32) and one log-sum-exp per row; the scores are computed again in the backward.
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

# A call is a dict of its arguments by name. autograd sees a tensor only where it is an argument of its own: a Function
# takes a dict of all others, with the length of each list of tensors, and behind it the tensors in this order.
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
    """Return softmax(score_mod(scale * q k^T) + mask) v, the log-sum-exp of each row, and its largest score.

    Differentiable in q, k, v, a floating mask, sink and the floating tensors that score_mod captures, through the
    result and the log-sum-exp. The largest score is not differentiable. A second derivative (create_graph=True)
    materializes the scores, and is not there with programs, a block mask or dropout; so does forward mode, which is
    not there with programs or a block mask.

    Args:
        q, k, v: ``[B, Hq, L, E]``, ``[B, Hkv, S, E]``, ``[B, Hkv, S, Ev]``, one floating dtype; Hq is a
            multiple of Hkv.
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
        (out ``[B, Hq, L, Ev]`` in the dtype of q, lse and largest score ``[B, Hq, L]`` in float32, float64 for float64
        inputs; without ``want_max_scores`` the third may be empty).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it.
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
    if forward_ad._current_level >= 0:  # -1 outside of forward mode
        return _with_tangents(call)
    # Inside vmap a tensor does not say that the one around it requires a gradient. An exported program gets it from the
    # dispatcher when it runs.
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
    """`lowbit::attention_forward` with its derivative (derivatives.py)."""
    real_out = call["real_out"]
    out, lse, max_scores = (_with_tangents if forward_ad._current_level >= 0 else _recorded)(call)
    return out.to(lse.dtype) if real_out else out, lse, max_scores


def _with_tangents(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    if not (call["score_mod"] or call["mask_mod"] or call["blocks"]):
        return attention_formulas.forward(call)
    tensors = refuse_tangents("attention with score_mod, mask_mod or a block mask", _tensors(call))
    return _recorded(_joined(_without_tensors(call), tensors))


def _recorded(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The op in a Function, which records nothing where no gradient is wanted."""
    q = call["q"]
    # want_max_scores keeps the call from `decode`, which sums q k^T in another order than the backward: at |s| = 200
    # p = exp(s - lse) would be off by four times as much. real_out asks for the result in float32. A gradient of the
    # scores is p (dp - sum of grad_out * out), and where one score is far above the others this difference is nothing
    # but the rounding of the result.
    # On a GPU both stay off: decode sums in the order of the tiles there, and every library has results of 16 bits.
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
    """The call of `_without_tensors` and `_tensors`, or of a stand-in for each tensor."""
    call = others | dict(zip(_TENSORS, tensors, strict=False))
    begin = len(_TENSORS)
    for name in _LISTS:
        call[name] = tensors[begin : begin + others[name]]
        begin += others[name]
    return call


class _TransformedAttention(torch.autograd.Function):
    """The op with its gradient, for Dynamo and torch.func."""

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
        twice = torch.is_grad_enabled()  # create_graph=True, and always in torch.func
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
    """The gradients that the op returns one behind the other, by the argument that they are of."""
    rest = iter(grads)
    of = {"q": next(rest), "k": next(rest), "v": next(rest), "seed": None}
    of["mask"] = next(rest).to(call["mask"].dtype) if needs["mask"] else None
    of["sink"] = next(rest) if needs["sink"] else None
    of |= {name: [None] * len(call[name]) for name in _LISTS}
    return of | {"score_captured": [next(rest) if needed else None for needed in needs["score_captured"]]}


class _Once(torch.autograd.Function):
    """The backward as a function without a derivative of its own. ``create_graph=True`` alone is fine; an error comes
    only when that second derivative is computed."""

    generate_vmap_rule = True
    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("attention: no second derivative with score_mod, mask_mod, a block mask or dropout")


class _Attention(torch.autograd.Function):
    """The same in one part: torch binds the arguments of a `setup_context` by their signature, 20 us a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _TransformedAttention.forward(*inputs)
        _TransformedAttention.setup_context(ctx, inputs, output)
        return output

    backward = _TransformedAttention.backward
