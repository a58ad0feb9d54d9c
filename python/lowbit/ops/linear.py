# SPDX-License-Identifier: Apache-2.0
"""y = act(x @ w.T + bias) * mul + add with a packed weight, and its gradient.

The Function below stands outside of the op and is used only when a gradient is wanted: one that torch's dispatcher
calls costs 5-9 us a call even without gradients. Programs of torch.export have that one (derivatives.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.registration import detached_function, function_of, register

register()
_linear_op = torch.ops.lowbit.linear.default
_dequantize_op = function_of("dequantize")
_linear_function = detached_function("linear")
_compiler = torch.compiler
_is_grad_enabled = torch.is_grad_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active

LinearArgs = tuple[int, int, int, int, bool, int]
"""(n, k, format, group_size, asymmetric, x_format), the numbers of `_C.FORMATS` and `_C.X_FORMATS`."""


def linear(
    x: Tensor,
    weight: Tensor,
    op_args: LinearArgs,
    bias: Tensor | None = None,
    activation: int = 0,
    mul: Tensor | None = None,
    add: Tensor | None = None,
    row: int = 0,
) -> Tensor:
    """`lowbit.linear` by numbers, as layers hold them: it costs a call of one token no look-up of names.

    Args:
        op_args: the arguments of the op, a `LinearArgs`.
        activation: a value of ``_C.ACTIVATIONS``.
        row: ``_C.row_number("linear", name)`` of the row that the call prefers; 0: the first that can serve it.
    """
    if _compiler._is_exporting_flag:
        return _exported(x, weight, op_args, bias, activation, mul, add, row)
    compiling = _is_dynamo_compiling()
    if forward_ad._current_level >= 0:  # -1 outside of forward mode
        if compiling:
            torch._dynamo.graph_break(msg="linear: a forward-mode derivative is computed outside of graphs")
        return _post_ops(_LinearWithTangents.apply(x, weight, bias, _Leaf(op_args), row), activation, mul, add)
    # Inside vmap a tensor does not say that the one around it requires a gradient.
    transformed = not compiling and _is_transformed()
    if _is_grad_enabled() and (
        transformed
        or x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (mul is not None and mul.requires_grad)
        or (add is not None and add.requires_grad)
    ):
        if (
            transformed
            or x.requires_grad
            or (bias is not None and bias.requires_grad and not _adds_exactly(x, bias, op_args))
        ):
            return _post_ops(_Linear.apply(x, weight, bias, op_args, row), activation, mul, add)
        if bias is None or not bias.requires_grad:
            return _post_ops(_product(x, weight, bias, op_args, row), activation, mul, add)
        # A trainable bias alone: 5 us where the Function takes 30.
        product = _product(x, weight, None, op_args, row) + bias
        return _post_ops(product, activation, mul, add)
    if not x.is_contiguous():
        x = x.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    op = _linear_op if compiling else _linear_function
    if activation == row == 0 and mul is None and add is None:  # each argument costs 0.3 us, and *op_args 0.15
        n, k, format, group_size, asymmetric, x_format = op_args
        return op(x, weight, n, k, format, group_size, asymmetric, x_format, bias)
    mul = None if mul is None else mul.contiguous()
    add = None if add is None else add.contiguous()
    return op(x, weight, *op_args, bias, activation, mul, add, row)


def _exported(
    x: Tensor,
    weight: Tensor,
    op_args: LinearArgs,
    bias: Tensor | None,
    activation: int,
    mul: Tensor | None,
    add: Tensor | None,
    row: int,
) -> Tensor:
    """One node, to which the dispatcher gives the gradient when the program runs."""
    bias, mul, add = (None if tensor is None else tensor.contiguous() for tensor in (bias, mul, add))
    return _linear_op(x.contiguous(), weight, *op_args, bias, activation, mul, add, row)


def differentiated_linear(
    x: Tensor,
    weight: Tensor,
    n: int,
    k: int,
    format: int,
    group_size: int,
    asymmetric: bool,
    x_format: int,
    bias: Tensor | None,
    activation: int,
    mul: Tensor | None,
    add: Tensor | None,
    row: int,
) -> Tensor:
    """`lowbit::linear` with its derivative (derivatives.py)."""
    op_args = n, k, format, group_size, asymmetric, x_format
    if forward_ad._current_level >= 0:
        y = _LinearWithTangents.apply(x, weight, bias, _Leaf(op_args), row)
    else:
        y = _Linear.apply(x, weight, bias, op_args, row)
    return _post_ops(y, activation, mul, add)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, op_args: LinearArgs, row: int) -> Tensor:
    op = _linear_op if _is_dynamo_compiling() else _linear_function
    return op(x.contiguous(), weight, *op_args, None if bias is None else bias.contiguous(), 0, None, None, row)


def _adds_exactly(x: Tensor, bias: Tensor, op_args: LinearArgs) -> bool:
    """Whether adding the bias to the stored product gives the kernel's result: it adds in float32 and rounds once."""
    whole = x.dtype is bias.dtype is torch.float32 and bias.shape == op_args[:1]
    return whole and not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


class _Linear(torch.autograd.Function):
    """x @ w.T + bias; backward: grad_out @ w, from the weight decoded again (nothing but the packed form is kept)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, op_args: LinearArgs, row: int) -> Tensor:
        return _product(x, weight, bias, op_args, row)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, op_args, _ = inputs
        ctx.save_for_backward(weight)
        ctx.op_args, ctx.x_dtype = op_args, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        *weight_args, _ = ctx.op_args
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad_out, weight, weight_args).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_out.float().reshape(-1, grad_out.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_bias, None, None


class _Leaf(tuple):
    """op_args as one argument of a Function: torch counts those of `jvp` under vmap with tuples taken apart."""


class _LinearWithTangents(_Linear):
    """The same in forward mode, where the tangent is x' @ w.T + bias', as straight-through as the backward. A class of
    its own: Dynamo takes no Function with a `jvp` where a gradient is wanted, and ignores the `jvp` elsewhere."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Linear.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])
        ctx.y_shape, ctx.y_dtype = output.shape, output.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 5 if grad_out is None else _Linear.backward(ctx, grad_out)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: None, bias: Tensor | None, *_: None) -> Tensor:
        *weight_args, _ = ctx.op_args
        y = 0.0 if bias is None else bias.float().expand(ctx.y_shape)
        if x is not None:
            y = y + x.float() @ _dequantize_op(*ctx.saved_tensors, *weight_args).T
        return y.to(ctx.y_dtype)


activation_functions = (
    lambda y: y,
    functional.relu,
    functional.gelu,
    lambda y: functional.gelu(y, approximate="tanh"),
    functional.silu,
)


def _post_ops(y: Tensor, activation: int, mul: Tensor | None, add: Tensor | None) -> Tensor:
    if not 0 <= activation < len(activation_functions):
        raise ValueError(f"linear: activation must be 0 to {len(activation_functions) - 1}, got {activation}")
    y = activation_functions[activation](y)
    if mul is not None:
        y = y * mul
    return y if add is None else y + add
