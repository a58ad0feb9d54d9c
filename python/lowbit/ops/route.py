# SPDX-License-Identifier: Apache-2.0
"""The experts of each token and their weights, from the logits of a router, with the gradient that routers have: the
choice itself has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit import _C
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register

register()
_call = function_of("route")


def route(
    logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    correction: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 1,
    zero_outside: bool = False,
    normalize: bool = False,
    eps: float = 0.0,
    least: float = 0.0,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k of E experts for each token, in float32, as the routers of transformers do.

    A token with nan among its choices has the weights nan and the experts 0 to k - 1; others do not notice. Of equal
    choices the first is taken first. Gradients go to ``logits`` and ``expert_scale``; ``correction`` decides the choice
    alone and gets none.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16, any strides.
        k: experts of a token.
        scoring: the scores are ``"softmax"``, ``"sigmoid"`` or ``"sqrt_softplus"`` of all logits, and choices are
            scores + correction. With ``"softmax_of_chosen"`` and ``"sigmoid_of_chosen"`` choices are logits +
            correction, and the chosen logits are scored.
        correction: ``[E]``, any of the three dtypes, added to the scores (or logits) for the choice.
        groups: experts are in groups of E / groups behind one another.
        groups_kept: groups of which experts are chosen.
        group_top: a group is as good as the sum of its ``group_top`` largest choices.
        zero_outside: choices of other groups are 0, which negative ones are smaller than; else -inf.
        normalize: divide the weights of a token by ``max(sum + eps, least)``.
        eps: added to the sum.
        least: the least that is divided by.
        scale: factor of all weights.
        expert_scale: ``[E]``, any of the three dtypes: a factor for each expert.

    Returns:
        Weights float32 ``[T, k]`` and experts int64 ``[T, k]``, in the order of the choices, the largest first.

    Raises:
        ValueError: a shape does not fit, ``k``, ``groups``, ``groups_kept`` or ``group_top`` is more than there is,
            ``scoring`` is not one of the above, or a number is not finite or negative.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a derivative in forward mode is wanted.
    """
    if scoring not in _C.SCORINGS:
        raise ValueError(f"route: scoring must be one of {', '.join(_C.SCORINGS)}, got {scoring!r}")
    if forward_ad._current_level >= 0:  # -1 outside of forward mode
        refuse_tangents("route", (logits, correction, expert_scale))
    number = _C.SCORINGS[scoring]
    choice = correction, groups, groups_kept, group_top, zero_outside
    weighting = normalize, eps, least, scale
    wanted = logits.requires_grad or (expert_scale is not None and expert_scale.requires_grad)
    if torch.is_grad_enabled() and wanted and not torch.compiler._is_exporting_flag:
        return _Route.apply(logits, k, number, choice, weighting, expert_scale)
    if correction is not None:
        choice = correction.detach(), *choice[1:]
    return _call(logits, k, number, *choice, *weighting, expert_scale)


def differentiated_route(
    logits: Tensor,
    k: int,
    scoring: int,
    correction: Tensor | None,
    groups: int,
    groups_kept: int,
    group_top: int,
    zero_outside: bool,
    normalize: bool,
    eps: float,
    least: float,
    scale: float,
    expert_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`lowbit::route` with its gradient (derivatives.py)."""
    if forward_ad._current_level >= 0:
        refuse_tangents("route", (logits, correction, expert_scale))
    choice = correction, groups, groups_kept, group_top, zero_outside
    return _Route.apply(logits, k, scoring, choice, (normalize, eps, least, scale), expert_scale)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        k: int,
        scoring: int,
        choice: tuple[Tensor | None, int, int, int, bool],
        weighting: tuple[bool, float, float, float],
        expert_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        correction, *groups = choice
        if correction is not None:
            correction = correction.detach()
        weights, index = _call(logits, k, scoring, correction, *groups, *weighting, expert_scale)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index, expert_scale)
        ctx.scoring, ctx.weighting = list(_C.SCORINGS)[scoring], weighting
        return weights, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, index, expert_scale = ctx.saved_tensors
        normalize, eps, least, scale = ctx.weighting
        scores = _scores_of_chosen(logits.float(), index, ctx.scoring)
        total = scores.sum(-1, keepdim=True) + eps
        divisor = total.clamp(min=least) if normalize else torch.ones_like(total)
        grad_scale = None
        grad = grad * scale
        if expert_scale is not None:
            if ctx.needs_input_grad[5]:
                of_chosen = (grad * scores / divisor).flatten()
                grad_scale = of_chosen.new_zeros(len(expert_scale)).index_add_(0, index.flatten(), of_chosen)
                grad_scale = grad_scale.to(expert_scale.dtype)
            grad = grad * expert_scale.float()[index]
        grad = grad / divisor
        if normalize:
            grad = grad - torch.where(total >= least, (grad * scores).sum(-1, keepdim=True) / divisor, 0.0)
        grad = _grad_of_logits(grad, logits.float(), index, scores, ctx.scoring)
        return grad.to(logits.dtype), None, None, None, None, grad_scale


def _scores_of_chosen(logits: Tensor, index: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1).gather(1, index)
    chosen = logits.gather(1, index)
    if scoring == "softmax_of_chosen":
        return chosen.softmax(-1)
    return torch.nn.functional.softplus(chosen).sqrt() if scoring == "sqrt_softplus" else chosen.sigmoid()


def _grad_of_logits(grad: Tensor, logits: Tensor, index: Tensor, scores: Tensor, scoring: str) -> Tensor:
    """Return the gradient of all logits, float32 [T, E], from that of the chosen scores."""
    if scoring == "softmax":
        return torch.zeros_like(logits).scatter(1, index, grad * scores) - logits.softmax(-1) * (grad * scores).sum(
            -1, keepdim=True
        )
    if scoring == "softmax_of_chosen":
        grad = scores * (grad - (grad * scores).sum(-1, keepdim=True))
    elif scoring == "sqrt_softplus":
        grad = grad * logits.gather(1, index).sigmoid() / (2 * scores)
    else:
        grad = grad * scores * (1 - scores)
    return torch.zeros_like(logits).scatter(1, index, grad)


def fake(logits: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
