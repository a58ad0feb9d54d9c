# SPDX-License-Identifier: Apache-2.0
"""Routing: the experts of each token and their weights, from the logits of a router. Weights have a gradient, but the
choice of experts has none."""

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

SCORINGS: dict[str, int] = _C.SCORINGS
"""The number of each ``scoring``, as the op takes it."""


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
    """Choose k of E experts for each token and return their weights, in float32, as the routers of transformers do.

    The experts with the k largest ranks are chosen, where a rank is a score plus ``correction``. Of equal ranks, the
    expert with the lower index comes first. A token with nan among its ranks gets the weights nan and the experts 0 to
    k - 1; other tokens are not affected. ``logits`` and ``expert_scale`` get gradients; ``correction`` only affects the
    choice and gets none.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16, any strides.
        k: number of experts per token.
        scoring: with ``"softmax"``, ``"sigmoid"`` or ``"sqrt_softplus"``, this function of all logits gives the scores,
            and ranks are scores + correction. With ``"softmax_of_chosen"`` and ``"sigmoid_of_chosen"``, ranks are
            logits + correction, and only the chosen logits are scored.
        correction: ``[E]``, any of the three dtypes, added to scores or logits for the choice.
        groups: number of groups of E / groups consecutive experts.
        groups_kept: number of groups from which experts are chosen.
        group_top: groups are compared by the sum of their ``group_top`` largest ranks.
        zero_outside: whether ranks in other groups become 0, so that they still precede negative ranks; otherwise -inf.
        normalize: whether the weights of a token are divided by ``max(sum + eps, least)``.
        eps: value added to the sum.
        least: the min divisor.
        scale: factor of all weights.
        expert_scale: ``[E]``, any of the three dtypes, a factor per expert.

    Returns:
        Weights float32 ``[T, k]`` and experts int64 ``[T, k]``, in descending order of their ranks.

    Raises:
        ValueError: a shape does not fit; ``k``, ``groups``, ``groups_kept`` or ``group_top`` is too large; ``scoring``
            is not one of the above; or a number is negative or not finite.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a forward-mode derivative is requested.

    Example:
        >>> weights, experts = lowbit.route(router(x), k=8, normalize=True)
    """
    if scoring not in _C.SCORINGS:
        raise ValueError(f"route: scoring must be one of {', '.join(_C.SCORINGS)}, got {scoring!r}")
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
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
    """Compute `lowbit::route` with its gradient, for derivatives.py."""
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
    """Return the gradient of all logits, float32 ``[T, E]``, from that of the chosen scores."""
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
