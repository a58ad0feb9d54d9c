# SPDX-License-Identifier: Apache-2.0
"""LoRA over packed linear layers that read one x, as one autograd Function:

    y = x @ w.T + bias + sum over adapters of scaling * (x @ down.T) @ up.T        for each layer

The parts of adapters are added by the products that make them, in the forward and to the gradient of x: a sum of its own
takes as long as the product of a low rank. The factors that read x are joined, so that x is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.linear import LinearArgs, linear
from lowbit.ops.registration import function_of, register

register()
_linear_function = function_of("linear")

LowRankFactors = tuple[Tensor, Tensor, float]
"""down ``[r, k]``, up ``[n, r]`` and the scaling of an adapter."""


class LoraLayer(NamedTuple):
    """A packed layer with its adapters, if it has any: the arguments of `lowbit.ops.linear.linear`, whose bias is frozen,
    and factors in the dtype of x."""

    weight: Tensor
    bias: Tensor | None
    op_args: LinearArgs
    row: int
    adapters: Sequence[LowRankFactors]


class Layout(NamedTuple):
    """What is no tensor of layers that read one x. The layers' tensors are those of `tensors_of`."""

    op_args: tuple[LinearArgs, ...]
    rows: tuple[int, ...]
    layers: tuple[int, ...]
    """The layer of each adapter."""
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]

    def parts(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Split tensors into weights, biases, downs and ups."""
        layers, adapters = len(self.rows), len(self.ranks)
        ends = (0, layers, 2 * layers, 2 * layers + adapters, 2 * layers + 2 * adapters)
        return tuple(tensors[begin:end] for begin, end in zip(ends[:-1], ends[1:], strict=True))


def layout_of(layers: Sequence[LoraLayer]) -> Layout:
    """Return what is no tensor of the layers."""
    adapters = [(i, down.shape[0], scaling) for i, layer in enumerate(layers) for down, _, scaling in layer.adapters]
    of_adapters = tuple(zip(*adapters, strict=True)) or ((), (), ())
    return Layout(tuple(each.op_args for each in layers), tuple(each.row for each in layers), *of_adapters)


def tensors_of(layers: Sequence[LoraLayer]) -> list[Tensor | None]:
    """Return the weights of the layers, then their biases, downs and ups."""
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    frozen = [*(each.weight for each in layers), *(each.bias for each in layers)]
    return [*frozen, *(down for down, _, _ in adapters), *(up for _, up, _ in adapters)]


def lora_linear(x: Tensor, *layers: LoraLayer) -> tuple[Tensor, ...]:
    """Compute layers that read x ``[..., k]``, eager and with gradients by x and the factors; the results."""
    return _LoraLinear.apply(x, layout_of(layers), *tensors_of(layers))


def products(x: Tensor, layout: Layout, tensors: Sequence[Any]) -> tuple[list[Tensor], Tensor]:
    """Return the results of the layers, and of the joined downs ``[m, sum of ranks]``; x is contiguous."""
    weights, biases, downs, ups = layout.parts(tensors)
    calls = zip(weights, biases, layout.op_args, layout.rows, strict=True)
    ys = [_linear_function(x, weight, *op_args, bias, 0, None, None, row) for weight, bias, op_args, row in calls]
    rows = rows_of(x)
    inner = rows @ torch.cat(downs).T if downs else rows.new_empty(0)
    for part, up, layer, scaling in zip(_split(inner, layout, 1), ups, layout.layers, layout.scalings, strict=True):
        rows_of(ys[layer]).addmm_(part, up.T, alpha=scaling)
    return ys, inner


@torch.autocast("cpu", enabled=False)  # a backward may run in one that its forward did not
def gradients(x: Tensor, of_ys: Sequence[Tensor], inner: Tensor, layout: Layout, tensors: Sequence[Any],
              needs_x: bool, needs: Sequence[bool]) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x and then of the tensors, where they are needed."""
    weights, biases, downs, ups = layout.parts(tensors)
    *_, needs_downs, needs_ups = layout.parts(needs)
    rows, of_rows = rows_of(x), [rows_of(of_y) for of_y in of_ys]
    of_inner = torch.empty_like(inner)
    of_downs: list[Tensor | None] = [None] * len(downs)
    of_ups: list[Tensor | None] = [None] * len(ups)
    of_parts = _split(of_inner, layout, 1)
    for i, (part, layer, scaling) in enumerate(
        zip(_split(inner, layout, 1), layout.layers, layout.scalings, strict=True)
    ):
        torch.addmm(of_parts[i], of_rows[layer], ups[i], beta=0, alpha=scaling, out=of_parts[i])
        if needs_ups[i]:  # the transposed product is the faster one
            of_ups[i] = (part.T @ of_rows[layer]).mul_(scaling).T.contiguous()
    if any(needs_downs):
        found = _split(of_inner.T @ rows, layout, 0)
        of_downs = [of_down if needed else None for of_down, needed in zip(found, needs_downs, strict=True)]
    of_x = None
    if needs_x:
        for weight, op_args, of_row in zip(weights, layout.op_args, of_rows, strict=True):
            of_x = input_gradient(of_row, weight, op_args[:-1], of_x)
        of_x = of_x.to(x.dtype)  # type: ignore[union-attr]  # there is a layer
        if downs:
            of_x.addmm_(of_inner, torch.cat(downs))
        of_x = of_x.view(x.shape)
    return [of_x, *[None] * (len(weights) + len(biases)), *of_downs, *of_ups]


def composed(x: Tensor, layout: Layout, tensors: Sequence[Any]) -> list[Tensor]:
    """Return the results of the layers, computed by functions that can be differentiated more than once."""
    weights, biases, downs, ups = layout.parts(tensors)
    calls = zip(weights, layout.op_args, biases, layout.rows, strict=True)
    ys = [linear(x, weight, op_args, bias, row=row) for weight, op_args, bias, row in calls]
    for down, up, layer, scaling in zip(downs, ups, layout.layers, layout.scalings, strict=True):
        ys[layer] = ys[layer] + x @ down.T @ up.T * scaling
    return ys


def differentiable_gradients(
    composed: Any, inputs: Sequence[Any], needs: Sequence[bool], of_ys: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of ``composed(*inputs)`` by the inputs that need one, for ``create_graph=True``."""
    # Aliases, so that what one input is made of another does not count.
    aliases = [each.view_as(each) if needed else each for each, needed in zip(inputs, needs, strict=True)]
    wanted = [alias for alias, needed in zip(aliases, needs, strict=True) if needed]
    ys = [(y, of_y) for y, of_y in zip(composed(*aliases), of_ys, strict=True) if y.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in ys], wanted, [of_y for _, of_y in ys], create_graph=True))
    return [next(found) if needed else None for needed in needs]


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, *tensors: Any) -> tuple[Tensor, ...]:
        ys, inner = products(x.contiguous(), layout, tensors)
        ctx.save_for_backward(x, inner, *tensors)
        ctx.layout = layout
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *of_ys: Tensor) -> tuple[Any, ...]:
        x, inner, *tensors = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs, wanted = (x, *tensors), (needs_x, *needs)
            found = differentiable_gradients(lambda x, *rest: composed(x, ctx.layout, rest), inputs, wanted, of_ys)
        else:
            found = gradients(x, of_ys, inner, ctx.layout, tensors, needs_x, needs)
        return found[0], None, *found[1:]


def rows_of(x: Tensor) -> Tensor:
    """Return ``x [..., k]`` as ``[m, k]``."""
    return x.reshape(-1, x.shape[-1])


def _split(joined: Tensor, layout: Layout, dim: int) -> Sequence[Tensor]:
    """Split what the joined downs computed into the parts of the adapters."""
    return joined.split(layout.ranks, dim) if layout.ranks else ()
