# SPDX-License-Identifier: Apache-2.0
"""y = act(x @ w.T + bias) * mul + add with a packed weight, and its gradient.

The autograd Function below wraps the op and is used only if a gradient is needed. A Function inside torch's dispatcher
would slow down every call, even without gradients; only programs of torch.export use such a Function (derivatives.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.other_inputs import of_nested
from lowbit.ops.registration import detached_function, function_of, register

register()
_linear_op = torch.ops.lowbit.linear.default
_dequantize_op = function_of("dequantize")
_linear_function = detached_function("linear")
_differentiated_function = _linear_op._op
_compiler = torch.compiler
_is_grad_enabled = torch.is_grad_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active
_is_jit_tracing = torch._C._is_tracing

LinearArgs = tuple[int, int, int, int, bool, int]
"""(n, k, format, group_size, asymmetric, x_format), with the numbers of `_C.FORMATS` and `_C.X_FORMATS`."""


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
    """Compute `lowbit.linear` with numbers instead of names, as layers store them, which saves the lookup of names.

    Args:
        x, weight, bias, mul, add: the arguments of `lowbit.linear`.
        op_args: format and size of the weight, and format of the activations.
        activation: a value of ``_C.ACTIVATIONS``.
        row: ``_C.row_number("linear", name)`` of the preferred kernel row; 0 is the first row that can serve the call.
    """
    if _compiler._is_exporting_flag:
        return _exported(x, weight, op_args, bias, activation, mul, add, row)
    compiling = _is_dynamo_compiling()
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        if compiling:
            torch._dynamo.graph_break(msg="linear: a forward-mode derivative is computed outside of graphs")
        return _post_ops(_LinearWithTangents.apply(x, weight, bias, _Leaf(op_args), row), activation, mul, add)
    # Inside vmap, requires_grad does not show whether the wrapped tensor requires a gradient.
    transformed = not compiling and _is_transformed()
    if compiling and x.is_nested:  # in eager mode the layer finds this out from the error of the op
        rest = {"activation": activation, "mul": mul, "add": add, "row": row}
        return of_nested(partial(linear, weight=weight, op_args=op_args, bias=bias, **rest), x)
    op = _linear_op if compiling else _linear_function
    if _is_grad_enabled() and (
        transformed
        or x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (mul is not None and mul.requires_grad)
        or (add is not None and add.requires_grad)
    ):
        if compiling or not _is_jit_tracing():
            return _with_gradient(x, weight, op_args, bias, activation, mul, add, row, transformed)
        op = _differentiated_function  # torch compares its graph with one without gradients, to the line of the call
    if not x.is_contiguous():
        x = x.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if activation == row == 0 and mul is None and add is None:  # fewer arguments make a call faster
        n, k, format, group_size, asymmetric, x_format = op_args
        return op(x, weight, n, k, format, group_size, asymmetric, x_format, bias)
    mul = None if mul is None else mul.contiguous()
    add = None if add is None else add.contiguous()
    return op(x, weight, *op_args, bias, activation, mul, add, row)


def _with_gradient(
    x: Tensor,
    weight: Tensor,
    op_args: LinearArgs,
    bias: Tensor | None,
    activation: int,
    mul: Tensor | None,
    add: Tensor | None,
    row: int,
    transformed: bool,
) -> Tensor:
    """Return the result of a call that needs a gradient."""
    trains_bias = bias is not None and bias.requires_grad
    if transformed or x.requires_grad or (trains_bias and not _adds_exactly(x, bias, op_args)):
        return _post_ops(_Linear.apply(x, weight, bias, op_args, row), activation, mul, add)
    if not trains_bias:
        return _post_ops(_product(x, weight, bias, op_args, row), activation, mul, add)
    # If only the bias is trainable, torch's addition is much faster than the Function.
    return _post_ops(_product(x, weight, None, op_args, row) + bias, activation, mul, add)


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
    """Call the op as a single node of the graph. When the program runs, the dispatcher adds the gradient."""
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
    """Compute `lowbit::linear` with its derivative, for derivatives.py."""
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
    """Return whether adding the bias after the op gives the kernel's result. The kernel adds it in float32 and rounds
    once, so this needs float32 everywhere."""
    whole = x.dtype is bias.dtype is torch.float32 and bias.shape == op_args[:1] and not x.is_meta
    return whole and not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


class _Linear(torch.autograd.Function):
    """Autograd Function of x @ w.T + bias. Only the packed weight is saved; the backward grad_out @ w decodes it."""

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
    """A tuple that counts as one argument of a Function: under vmap, torch unpacks plain tuples when it counts the
    arguments of `jvp`."""


class _LinearWithTangents(_Linear):
    """`_Linear` with forward mode: the tangent is x' @ w.T + bias', straight-through like the backward.

    It is a separate class, because Dynamo rejects a Function with a `jvp` if a gradient is needed, and otherwise
    ignores the `jvp`.
    """

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
