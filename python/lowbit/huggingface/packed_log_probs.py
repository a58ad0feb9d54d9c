# SPDX-License-Identifier: Apache-2.0
"""TRL's log-probabilities over a packed head, by the op linear_cross_entropy, which has no logits in memory.

A row's loss is minus its log-probability, and the op computes the gradient of every row's loss in the pass that makes
the losses. So the backward only multiplies each row by its number, and what else TRL asks for costs little. With
``z = scale * x @ head.T`` and ``g = dloss/dx = scale * (sum of p[v] * head[v] - head[target])``:

    entropy            = lse - sum of p[v] z[v] = loss - x . g
    mean_logits        = scale * x . mean of head[v]
    log_sum_sq_probs   = lse of 2 z - 2 lse
    is_top1            = the loss of 2^30 z is 0 and not at least 2^30 differences of two floats; for p > 1/2 it is known
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.huggingface.fused_head import ServedHead, check_bytes
from lowbit.ops.decoded_rows import decoded_rows
from lowbit.ops.fake_quantize import fake_quantize_activations
from lowbit.ops.linear import LinearArgs
from lowbit.ops.linear_cross_entropy import LossFormula, losses_and_gradients
from lowbit.quant.quant_linear import QuantLinear

_SHARP = 2.0**30  # more than the reciprocal of the difference of two neighbouring floats of 2^-7
_ROWS = 4096  # of the head, decoded at a time


class PackedLogProbs:
    """A replacement for TRL's ``ChunkedLogProbFunction``, with its ``apply``.

    Activations are rounded as the head rounds them, so that probabilities are those of the model's own logits. A head
    with a bias, one that is not on the CPU, and a softcap where more than log-probabilities is asked for, are served by
    decoded rows; so is the gradient of entropies.

    Args:
        function: ``ChunkedLogProbFunction``.
        find: returns the output head.
    """

    def __init__(self, function: type[torch.autograd.Function], find: Callable[[], nn.Module]) -> None:
        self.by_rows, self.find = ServedHead(function, {1: find}), find

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        chunk_size: int, softcap: float | None, logit_scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        head, more = self.find(), frozenset(outputs) - {"log_probs"}

        def by_rows(hidden: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, ...]:
            if isinstance(head, QuantLinear):
                hidden = _rounded(hidden, head.op_args)
            of_product = temperature, chunk_size, softcap, logit_scale
            return self.by_rows.apply(hidden, weight, bias, targets, *of_product, outputs)

        if not isinstance(head, QuantLinear) or bias is not None or not weight.is_cpu or (softcap and more):
            return by_rows(hidden, outputs)
        check_bytes("linear_cross_entropy", weight, head)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # TRL divides behind the softcap: softcap * tanh(u / softcap) / temperature
        formula = LossFormula(-100, logit_scale / temperature, (softcap or 0.0) / temperature, 0.0, 0.0)
        return _LogProbs.apply(
            hidden, weight, targets, head.op_args, formula, more, lambda x: by_rows(x, ("log_probs", "entropy"))[1]
        )


def _rounded(x: Tensor, op_args: LinearArgs) -> Tensor:
    """Return the activations that a product with this head multiplies."""
    *_, group_size, _, x_format = op_args
    return fake_quantize_activations(x, x_format, group_size) if x_format else x


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, op_args: LinearArgs, formula: LossFormula,
        outputs: frozenset[str], entropy_by_rows: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.entropy_by_rows, has_entropy = hidden.dtype, entropy_by_rows, "entropy" in outputs
        x = hidden.float().contiguous()  # its gradient is rounded once, behind the factors of the rows
        product = _rounded(x, op_args)

        def computed(labels: Tensor, factor: float = 1.0, gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
            scaled = formula._replace(scale=factor * formula.scale)
            return losses_and_gradients(x, weight, labels, op_args, scaled, gradient)

        loss, lse, gradient = computed(targets, gradient=ctx.needs_input_grad[0] or has_entropy)
        entropy = loss - (product * gradient).sum(-1) if has_entropy else None
        squares = computed(targets, 2.0)[1] - 2 * lse if "log_sum_sq_probs" in outputs else None
        mean = top = None
        if "mean_logits" in outputs:
            mean = (product.double() @ _mean_row(weight, op_args) * formula.scale).float()
        if "is_top1" in outputs:
            likely = loss < math.log(2.0)
            top = likely | (computed(targets.where(~likely, formula.ignore_index), _SHARP)[0] < 0.5)
        ctx.save_for_backward(gradient, hidden if has_entropy else None)
        ctx.mark_non_differentiable(*(value for value in (squares, mean, top) if value is not None))
        return -loss, entropy, squares, mean, top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        gradient, hidden = ctx.saved_tensors
        total = torch.zeros_like(gradient) if of_log_probs is None else gradient * -of_log_probs.float()[:, None]
        if of_entropy is not None:
            with torch.enable_grad():
                x = hidden.detach().requires_grad_()
                total += torch.autograd.grad(ctx.entropy_by_rows(x), x, of_entropy)[0]
        return (total.to(ctx.dtype), *([None] * 6))


def _mean_row(weight: Tensor, op_args: LinearArgs) -> Tensor:
    """Return the mean of the rows of a packed weight, float64 ``[k]``."""
    n = op_args[0]
    parts = (decoded_rows(weight, op_args[:-1], row, min(row + _ROWS, n)) for row in range(0, n, _ROWS))
    return torch.stack([part.sum(0, dtype=torch.float64) for part in parts]).sum(0) / n
