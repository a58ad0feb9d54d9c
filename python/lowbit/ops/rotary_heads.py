# SPDX-License-Identifier: Apache-2.0
"""The heads of attention in training: queries, keys and values from their product, with head norms and rotary
embedding. It is `rope_append` to new memory, with the gradient by the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.ops.derivatives import refuse_derivatives
from lowbit.ops.registration import function_of, register
from lowbit.ops.rms_norm import reciprocal_root_mean_square, rms_norm_gradient

register()
_append = function_of("rope_append_")


def rotary_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, eager and with the gradient by qkv, once.

    Args:
        qkv: heads of queries, keys and values, in this order, ``[B, L, Hq + 2 Hkv, E]``.
        cos, sin: ``[B or 1, L, R]``, frozen; the first half of the first R elements of a head is rotated with the second.
        kv_heads: Hkv.
        norms: the weights ``[E]`` of RMSNorms of the heads of queries and keys before the rotation, frozen.
        eps, offset: the parameters of the norms, as in `rms_norm`.
    """
    return _RotaryHeads.apply(qkv, cos, sin, kv_heads, norms, eps, offset)


class _RotaryHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norms: tuple[Tensor, Tensor] | None,
                eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        batch, length, _, size = qkv.shape
        keys, values = (qkv.new_empty(batch, kv_heads, length, size) for _ in range(2))
        q_weight, k_weight = norms or (None, None)
        queries = _append(qkv, cos, sin, keys, values, 0, q_weight, k_weight, eps, offset, 0, False, False, False)
        ctx.save_for_backward(cos, sin, *((qkv, q_weight, k_weight) if norms else ()))
        ctx.norm = eps, offset
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, of_queries: Tensor, of_keys: Tensor, of_values: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of rotary heads", (of_queries, of_keys, of_values))
        cos, sin, *normed = ctx.saved_tensors
        eps, offset = ctx.norm
        batch, queries, length, size = of_queries.shape
        ends = queries, queries + of_keys.shape[1], queries + 2 * of_keys.shape[1]
        of_qkv = of_queries.new_empty(batch, length, ends[-1], size)
        for begin, end, of_heads, weight in zip(
            (0, queries), ends, (of_queries, of_keys), normed[1:] or (None, None), strict=False
        ):
            into, of_heads = of_qkv[:, :, begin:end], of_heads.transpose(1, 2)
            _turn_back(of_heads, cos[:, :, None], sin[:, :, None], into)
            if weight is not None:
                heads = normed[0][:, :, begin:end].float()
                scale = reciprocal_root_mean_square(heads, eps)
                into.copy_(rms_norm_gradient(heads, scale, into.float(), weight.float() + offset))
        of_qkv[:, :, ends[1] :] = of_values.transpose(1, 2)
        return of_qkv, None, None, None, None, None, None


def _turn_back(grad: Tensor, cos: Tensor, sin: Tensor, into: Tensor) -> None:
    """Write the gradient of heads that were rotated."""
    columns, half = cos.shape[-1], cos.shape[-1] // 2
    torch.mul(grad[..., :columns], cos, out=into[..., :columns])
    into[..., :half].addcmul_(grad[..., half:columns], sin[..., half:])
    into[..., half:columns].addcmul_(grad[..., :half], sin[..., :half], value=-1)
    into[..., columns:] = grad[..., columns:]
