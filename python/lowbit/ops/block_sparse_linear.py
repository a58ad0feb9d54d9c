# SPDX-License-Identifier: Apache-2.0
"""y = x @ w.T + bias with a block-sparse weight (torch's BSR layout), and its gradients.

Gradients are computed as dense products. That of x uses the dense weight; that of the weight is split into blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register

register()
_call = function_of("block_sparse_linear")


def block_sparse_linear(
    x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply by a block-sparse weight ``[n, k]`` and add the bias.

    Blocks that are not stored are not multiplied, so inf or nan in x have no effect there.

    Args:
        x: ``[..., k]``, float32, bfloat16 or float16, any strides.
        values: the stored blocks ``[blocks, size, size]``, with the dtype of x (except in autocast); size is a multiple
            of 16.
        crow_indices: int32 ``[n / size + 1]``. Block row i has the blocks ``crow_indices[i]`` up to, but not including,
            ``crow_indices[i + 1]``.
        col_indices: int32 ``[blocks]``, the block column of each block, 0 to k / size - 1. Indices are not checked.
        bias: ``[n]``, any of the three dtypes.

    Returns:
        ``[..., n]``, dtype of x (inside ``torch.autocast``, autocast's dtype), accumulated in float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device, or a forward-mode derivative is requested.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, values = x.to(dtype), values.to(dtype)
    tensors = x, values, bias
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("block_sparse_linear", tensors)
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if wanted and not torch.compiler._is_exporting_flag:  # exported programs get gradients from the dispatcher
        return _BlockSparseLinear.apply(x, values, crow_indices, col_indices, bias)
    return _call(x, values, crow_indices, col_indices, bias)


def differentiated_block_sparse_linear(
    x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `lowbit::block_sparse_linear` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("block_sparse_linear", (x, values, bias))
    return _BlockSparseLinear.apply(x, values, crow_indices, col_indices, bias)


class _BlockSparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, crow_indices: Tensor, col_indices: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, values, crow_indices, col_indices)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _call(x, values, crow_indices, col_indices, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, values, crow_indices, col_indices = ctx.saved_tensors
        grad_x = grad_values = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_out @ dense_of_blocks(values, crow_indices, col_indices, x.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_w = grad_out.flatten(0, -2).T @ x.flatten(0, -2)
            grad_values = blocks_of(grad_w, values.shape[1])[_places(crow_indices, col_indices)]
        if ctx.needs_input_grad[4]:
            grad_bias = grad_out.float().flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_values, None, None, grad_bias


def blocks_of(weight: Tensor, size: int) -> Tensor:
    """Return a view ``[n / size, k / size, size, size]`` of ``[n, k]``."""
    return weight.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2)


def _places(crow_indices: Tensor, col_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return block row and block column of each stored block, int64 ``[blocks]`` each."""
    rows = torch.arange(len(crow_indices) - 1, device=crow_indices.device)
    return rows.repeat_interleave(crow_indices.diff(), output_size=len(col_indices)), col_indices.long()


def dense_of_blocks(values: Tensor, crow_indices: Tensor, col_indices: Tensor, k: int) -> Tensor:
    """Return the dense weight ``[n, k]``."""
    size = values.shape[1]
    blocks = values.new_zeros((len(crow_indices) - 1, k // size, size, size))
    blocks[_places(crow_indices, col_indices)] = values
    return blocks.transpose(1, 2).reshape(-1, k)


def fake(x: Tensor, values: Tensor, crow_indices: Tensor, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], (crow_indices.shape[0] - 1) * values.shape[1]))
