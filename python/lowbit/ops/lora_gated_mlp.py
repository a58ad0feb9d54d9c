# SPDX-License-Identifier: Apache-2.0
"""A gated MLP of packed layers with LoRA as one autograd Function:

    y = down(h),  h = act(gate(x)) * up(x)

It keeps gate(x), act(gate(x)) and up(x); h is made again in the backward. x is read once by gate and up, and their parts
of its gradient are added by the products that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.linear import activation_functions
from lowbit.ops.lora_linear import (
    Layout,
    LoraLayer,
    composed,
    differentiable_gradients,
    gradients,
    layout_of,
    products,
    tensors_of,
)

_aten = torch.ops.aten
_SLOPES: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda of_y, x: of_y,
    lambda of_y, x: _aten.threshold_backward(of_y, x, 0),
    lambda of_y, x: _aten.gelu_backward(of_y, x),
    lambda of_y, x: _aten.gelu_backward(of_y, x, approximate="tanh"),
    _aten.silu_backward,
)
"""The gradient of x, of each of `activation_functions`."""


def lora_gated_mlp(x: Tensor, gate: LoraLayer, up: LoraLayer, down: LoraLayer, activation: int) -> Tensor:
    """Compute the MLP, eager and with gradients by x and the factors of the layers.

    Args:
        x: ``[..., k]``.
        gate, up, down: the layers.
        activation: a value of ``_C.ACTIVATIONS``.
    """
    outer, inner = [gate, up], [down]
    layouts = layout_of(outer), layout_of(inner)
    return _LoraGatedMLP.apply(x, layouts, activation, *tensors_of(outer), *tensors_of(inner))


class _LoraGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layouts: tuple[Layout, Layout], activation: int, *tensors: Any) -> Tensor:
        outer, last = _halves(layouts, tensors)
        (gate, up), inner = products(x.contiguous(), layouts[0], outer)
        gated = activation_functions[activation](gate)
        (y,), inner_of_last = products(gated * up, layouts[1], last)
        ctx.save_for_backward(x, gate, gated, up, inner, inner_of_last, *tensors)
        ctx.layouts, ctx.activation = layouts, activation
        return y

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Any, ...]:
        x, gate, gated, up, inner, inner_of_last, *tensors = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs, wanted = (x, *tensors), (needs_x, *needs)
            found = differentiable_gradients(lambda *given: _composed(ctx, *given), inputs, wanted, [of_y])
            return found[0], None, None, *found[1:]
        outer, last = _halves(ctx.layouts, tensors)
        needs_outer, needs_last = _halves(ctx.layouts, needs)
        of_h, *of_last = gradients(gated * up, [of_y], inner_of_last, ctx.layouts[1], last, True, needs_last)
        of_up = of_h * gated
        of_gate = _SLOPES[ctx.activation](of_h.mul_(up), gate)
        of_x, *of_outer = gradients(x, [of_gate, of_up], inner, ctx.layouts[0], outer, needs_x, needs_outer)
        return of_x, None, None, *of_outer, *of_last


def _composed(ctx: Any, x: Tensor, *tensors: Any) -> list[Tensor]:
    outer, last = _halves(ctx.layouts, tensors)
    gate, up = composed(x, ctx.layouts[0], outer)
    return composed(activation_functions[ctx.activation](gate) * up, ctx.layouts[1], last)


def _halves(layouts: tuple[Layout, Layout], each: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split what there is for each tensor into that of gate and up and that of down."""
    count = 2 * len(layouts[0].rows) + 2 * len(layouts[0].ranks)
    return each[:count], each[count:]
