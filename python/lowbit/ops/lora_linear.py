# SPDX-License-Identifier: Apache-2.0
"""LoRA over a packed linear layer as one autograd Function:

    y = x @ w.T + bias + sum over adapters of scaling * (x @ down.T) @ up.T

The parts of adapters are added by the products that make them, in the forward and to the gradient of x: a sum of its own
takes as long as the product of a low rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.linear import LinearArgs
from lowbit.ops.registration import function_of, register

register()
_linear_function = function_of("linear")

LowRankFactors = tuple[Tensor, Tensor, float]
"""down ``[r, k]``, up ``[n, r]`` and the scaling of an adapter."""


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, op_args: LinearArgs, row: int, adapters: Sequence[LowRankFactors]
) -> Tensor:
    """Compute a packed layer and its adapters, eager and with gradients by x and the factors.

    Args:
        x: ``[..., k]``.
        weight, bias, op_args, row: as in `lowbit.ops.linear.linear`; the bias is frozen.
        adapters: at least one, whose factors have the dtype of x.
    """
    downs, ups, scalings = zip(*adapters, strict=True)
    return _LoraLinear.apply(x, weight, bias, op_args, row, scalings, *downs, *ups)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op_args: LinearArgs, row: int,
                scalings: tuple[float, ...], *factors: Tensor) -> Tensor:  # fmt: skip
        y = _linear_function(x.contiguous(), weight, *op_args, bias, 0, None, None, row)
        rows, of_rows = _rows_of(x), _rows_of(y)
        downs, ups = _halves(factors)
        inner = [rows @ down.T for down in downs]
        for part, up, scaling in zip(inner, ups, scalings, strict=True):
            of_rows.addmm_(part, up.T, alpha=scaling)
        ctx.save_for_backward(x, weight, *factors, *inner)
        ctx.op_args, ctx.scalings = op_args, scalings
        return y

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        x, weight, *saved = ctx.saved_tensors
        count = len(ctx.scalings)
        factors, inner = saved[: 2 * count], saved[2 * count :]
        downs, ups = _halves(factors)
        rows, of_rows = _rows_of(x), _rows_of(grad_out)
        if torch.is_grad_enabled():  # this backward is differentiated too: by x and the factors, not by what is saved
            inner = [rows @ down.T for down in downs]
        needs_x, *needs = ctx.needs_input_grad[:1] + ctx.needs_input_grad[6:]
        of_inner = [of_rows @ up * scaling for up, scaling in zip(ups, ctx.scalings, strict=True)]
        of_downs = [part.T @ rows if needs[i] else None for i, part in enumerate(of_inner)]
        of_ups = [
            of_rows.T @ (part * scaling) if needs[count + i] else None
            for i, (part, scaling) in enumerate(zip(inner, ctx.scalings, strict=True))
        ]
        of_x = None
        if needs_x:
            *weight_args, _ = ctx.op_args
            of_x = input_gradient(of_rows, weight, weight_args).to(x.dtype)
            for part, down in zip(of_inner, downs, strict=True):
                of_x.addmm_(part, down)
            of_x = of_x.view(x.shape)
        return of_x, None, None, None, None, None, *of_downs, *of_ups


def _rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _halves(factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    half = len(factors) // 2
    return factors[:half], factors[half:]
