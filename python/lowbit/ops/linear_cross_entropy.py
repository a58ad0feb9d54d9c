# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a vocabulary whose logits are never in memory, with gradients by hidden states, a float head and a
bias; the formula is in csrc/ops/linear_cross_entropy.hpp.

Gradients are linear in the weight that each row's loss has. A mean or a sum knows these weights in the forward, where
the gradients are computed with the losses, in one pass. Of losses per row (``reduction="none"``) they are known in the
backward alone, which computes the logits again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.autocast import in_autocast_dtype
from lowbit.ops.derivatives import is_recorded
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.linear import LinearArgs
from lowbit.ops.registration import function_of, register
from lowbit.ops.tracing import is_traced

register()
_call = function_of("linear_cross_entropy")

REDUCTIONS = ("mean", "sum", "none")


class LossFormula(NamedTuple):
    """The numbers of `lowbit.linear_cross_entropy`, in the order of the op; a softcap of 0 means none."""

    ignore_index: int
    scale: float
    softcap: float
    label_smoothing: float
    z_loss: float


def linear_cross_entropy(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    op_args: LinearArgs,
    bias: Tensor | None,
    formula: LossFormula,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Compute `lowbit.linear_cross_entropy` with numbers instead of names: the loss, and the logarithm of the sum of
    exponentials of each row."""
    x = in_autocast_dtype(x)
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("linear_cross_entropy", (x, head, bias))
    if head.dtype is torch.uint8:
        head = head.detach()
    if is_recorded((x, head, bias)):
        return _LinearCrossEntropy.apply(x, head, labels, op_args, bias, formula, reduction)
    loss, lse, *_ = _call(x, head, labels, *op_args, bias, None, *formula, False, False, False)
    return _reduced(loss, labels, formula, reduction), lse


def losses_and_gradients(
    x: Tensor, head: Tensor, labels: Tensor, op_args: LinearArgs, formula: LossFormula, of_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and lse of each row, and, if ``of_x``, the gradient of each row's loss by its x, in one pass."""
    ones = torch.ones_like(labels, dtype=torch.float32) if of_x else None
    return _call(x, head.detach(), labels, *op_args, None, ones, *formula, of_x, False, False)[:3]


def _count(labels: Tensor, formula: LossFormula) -> Tensor:
    return (labels != formula.ignore_index).sum().float()


def _reduced(loss: Tensor, labels: Tensor, formula: LossFormula, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / _count(labels, formula)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, labels: Tensor, op_args: LinearArgs, bias: Tensor | None,
                formula: LossFormula, reduction: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.op_args, ctx.formula, ctx.reduction = op_args, formula, reduction
        ctx.wanted = wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        if reduction == "none":
            loss, lse, *_ = _call(x, head, labels, *op_args, bias, None, *formula, False, False, False)
            ctx.save_for_backward(x, head, labels, bias)
            ctx.mark_non_differentiable(lse)
            return loss, lse
        weight = torch.ones_like(labels, dtype=torch.float32)
        # A float16 gradient of a mean over many rows would be subnormal: it is divided in the backward, behind the
        # factor of a gradient scaler.
        ctx.divides = reduction == "mean" and x.dtype is torch.float16
        if reduction == "mean" and not ctx.divides:
            weight = weight / _count(labels, formula)
        loss, lse, *grads = _call(x, head, labels, *op_args, bias, weight, *formula, *wanted)
        ctx.save_for_backward(labels, *grads)
        ctx.mark_non_differentiable(lse)
        return _reduced(loss, labels, formula, reduction), lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.reduction == "none":
            x, head, labels, bias = ctx.saved_tensors
            weight = grad_out.float().contiguous()
            labels = labels.where(weight != 0, ctx.formula.ignore_index)  # masked losses are not computed again
            *_, of_x, of_head, of_bias = _call(x, head, labels, *ctx.op_args, bias, weight, *ctx.formula, *ctx.wanted)
        else:
            labels, *grads = ctx.saved_tensors
            factor = grad_out / _count(labels, ctx.formula) if ctx.divides else grad_out
            of_x, of_head, of_bias = (
                _times(grad, factor) if wanted else grad for grad, wanted in zip(grads, ctx.wanted, strict=True)
            )
        of_x, of_head, of_bias = (
            grad if wanted else None for grad, wanted in zip((of_x, of_head, of_bias), ctx.wanted, strict=True)
        )
        return of_x, of_head, None, None, of_bias, None, None


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient times a number, multiplied in float32. It is 1 where the loss itself is differentiated: then
    a gradient of the size of the head is not copied."""
    if is_traced() or not factor.is_cpu:
        return (grad.float() * factor).to(grad.dtype)
    number = float(factor)
    return grad if number == 1.0 else grad * number


def fake(
    x: Tensor, head: Tensor, labels: Tensor, bias: Tensor | None, grad_x: bool, grad_head: bool, grad_bias: bool,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if wanted and tensor is not None:
            return x.new_empty(tensor.shape, dtype=tensor.dtype)
        return x.new_empty(0, dtype=torch.float32)

    rows = x.new_empty(labels.shape, dtype=torch.float32)
    return rows, torch.empty_like(rows), like(x, grad_x), like(head, grad_head), like(bias, grad_bias)
