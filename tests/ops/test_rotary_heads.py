# SPDX-License-Identifier: Apache-2.0
"""The heads of attention in training: rotation and norms with the gradient by the product."""

from __future__ import annotations

import pytest
import torch
from roundings import assert_close, normalized
from torch import Tensor

from lowbit.ops.rope_append import rope_append
from lowbit.ops.rotary_heads import rotary_heads


@pytest.mark.parametrize("columns", [16, 8], ids=["whole heads", "half of each head"])
@pytest.mark.parametrize("normed", [False, True], ids=["no norms", "norms of heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_have_the_gradient_of_float64(dtype: torch.dtype, normed: bool, columns: int) -> None:
    batch, length, queries, keys, size = 2, 5, 4, 2, 16
    qkv = torch.randn(batch, length, queries + 2 * keys, size).to(dtype).requires_grad_()
    angle = torch.rand(1, length, columns // 2).mul(6).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if normed else None
    found = rotary_heads(qkv, cos, sin, keys, norms, 1e-6 if normed else 0.0, 1.0 if normed else 0.0)
    wide = qkv.detach().double().requires_grad_()
    heads = list(wide.transpose(1, 2).split([queries, keys, keys], dim=1))
    for i in range(2):
        x = normalized(heads[i], norms[i].double(), 1.0) if norms else heads[i]
        turned, rest = x[..., :columns], x[..., columns:]
        swapped = torch.cat((-turned[..., columns // 2 :], turned[..., : columns // 2]), -1)
        heads[i] = torch.cat((turned * cos.double() + swapped * sin.double(), rest), -1)
    grads = [torch.randn(each.shape).to(dtype) for each in found]
    of_ours = torch.autograd.grad(found, qkv, grads)
    of_exact = torch.autograd.grad(heads, wide, [grad.double() for grad in grads])
    assert_close(
        [*map(Tensor.detach, found), *of_ours],
        [*map(Tensor.detach, heads), *of_exact],
        4 * size if dtype is torch.float32 else 6,
        dtype,
    )
    with torch.no_grad():  # the op makes them
        kept = [torch.empty(batch, keys, length, size, dtype=dtype) for _ in range(2)]
        theirs = rope_append(
            qkv, cos, sin, *kept, 0, *(norms or ()), **({"eps": 1e-6, "offset": 1.0} if normed else {})
        )
    assert all(map(torch.equal, found, (theirs, *kept)))


def test_a_second_derivative_of_heads_is_refused() -> None:
    qkv, angle = torch.randn(1, 3, 4, 8).requires_grad_(), torch.rand(1, 3, 8)
    queries, _, _ = rotary_heads(qkv, angle.cos(), angle.sin(), 1)
    with pytest.raises(NotImplementedError, match="the backward of rotary heads"):
        torch.autograd.grad(queries.square().sum(), qkv, create_graph=True)
