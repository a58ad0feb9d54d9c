# SPDX-License-Identifier: Apache-2.0
"""y[t, j] = x[t] @ w[index[t, j]].T + bias[index[t, j]] with packed weights, and its gradients: the products of a
mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.autocast import in_autocast_dtype
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.input_gradient import input_gradient
from lowbit.ops.linear import LinearArgs
from lowbit.ops.registration import define, function_of, register
from lowbit.ops.tracing import is_traced

register()
_call = function_of("gather_linear")


def gather_linear(x: Tensor, weight: Tensor, index: Tensor, op_args: LinearArgs, bias: Tensor | None = None) -> Tensor:
    """Compute `lowbit.gather_linear` with numbers instead of names, as layers store them."""
    check_index("gather_linear", index)
    x = in_autocast_dtype(x)
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("gather_linear", (x, bias))
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if wanted and not torch.compiler._is_exporting_flag:  # exported programs get gradients from the dispatcher
        return _GatherLinear.apply(x, weight, index, op_args, bias)
    return _call(x, weight, index, *op_args, bias)


def check_index(op: str, index: Tensor) -> None:
    """Raise TypeError for another dtype of ``index`` than the op takes. The op names those alone that some op takes."""
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: index must be int32 or int64, got {str(index.dtype).removeprefix('torch.')}")


def differentiated_gather_linear(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    n: int,
    k: int,
    format: int,
    group_size: int,
    asymmetric: bool,
    x_format: int,
    bias: Tensor | None,
) -> Tensor:
    """Compute `lowbit::gather_linear` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("gather_linear", (x, bias))
    return _GatherLinear.apply(x, weight, index, (n, k, format, group_size, asymmetric, x_format), bias)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: Tensor, op_args: LinearArgs, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, index)
        ctx.op_args, ctx.x_dtype, ctx.x_rank = op_args, x.dtype, x.dim()
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _call(x, weight, index, *op_args, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weight, index = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_of_rows(grad_out, weight, index, ctx.op_args)
            grad_x = (grad_x.sum(1) if ctx.x_rank == 2 else grad_x).to(ctx.x_dtype)
        if ctx.needs_input_grad[4]:
            rows = grad_out.float().flatten(0, 1)
            grad_bias = rows.new_zeros(len(weight), rows.shape[1]).index_add_(0, index.flatten(), rows)
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias


def grad_of_rows(grad_out: Tensor, weight: Tensor, index: Tensor, op_args: LinearArgs) -> Tensor:
    """Return ``grad_out`` ``[T, J, n]`` times the weight of each row, float32 ``[T, J, k]``.

    Each weight is decoded once for all of its rows. In a traced graph this is one op, since the number of rows per
    weight depends on the values of ``index``.
    """
    numbers = [int(number) for number in op_args]
    if is_traced():
        return torch.ops.lowbit.gather_linear_grad(grad_out, weight, index, numbers)
    return _grad_of_rows(grad_out, weight, index, numbers)


def _grad_of_rows(grad_out: Tensor, weight: Tensor, index: Tensor, op_args: list[int]) -> Tensor:
    *weight_args, _ = op_args
    rows, order = grad_out.flatten(0, 1), index.flatten().argsort()
    counts = index.flatten().bincount(minlength=len(weight)).tolist()
    grad = rows.new_empty(len(rows), op_args[1], dtype=torch.float32)
    for packed, of_weight in zip(weight, order.split(counts), strict=True):
        if len(of_weight):
            grad[of_weight] = input_gradient(rows[of_weight], packed, weight_args).float()
    return grad.unflatten(0, index.shape)


def _fake_grad(grad_out: Tensor, weight: Tensor, index: Tensor, op_args: list[int]) -> Tensor:
    return grad_out.new_empty((*index.shape, op_args[1]), dtype=torch.float32)


define(
    "gather_linear_grad(Tensor grad_out, Tensor weight, Tensor index, int[] op_args) -> Tensor",
    _grad_of_rows,
    _fake_grad,
)


def fake(x: Tensor, index: Tensor, n: int, **_: Any) -> Tensor:
    return x.new_empty((*index.shape, n))
