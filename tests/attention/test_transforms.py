# SPDX-License-Identifier: Apache-2.0
"""torch.func, both vmaps of torch, batched gradients and second derivatives through attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowbit import create_block_mask, flex_attention, scaled_dot_product_attention
from lowbit.ops.attention import attention


def qkv(*leading: int) -> list[Tensor]:
    return [torch.randn(*leading, 2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5)
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], mask)


def test_vmap_is_one_call_per_entry_and_differentiable_from_outside() -> None:
    inputs = qkv(3)
    found, wanted = torch.vmap(ours)(*inputs), theirs(*inputs)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(torch.autograd.grad(found.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)
    one = torch.vmap(ours, in_dims=(1, None, None))(inputs[0].movedim(0, 1), inputs[1][0], inputs[2][0])
    torch.testing.assert_close(one, torch.stack([theirs(q, inputs[1][0], inputs[2][0]) for q in inputs[0]]))


@pytest.mark.parametrize("function", [ours, theirs])
def test_gradients_per_sample(function: Callable[..., Tensor]) -> None:
    inputs = qkv(3)
    per_sample = torch.vmap(torch.func.grad(lambda *tensors: function(*tensors).square().sum(), argnums=(0, 1, 2)))(*inputs)
    for found, wanted in zip(per_sample, torch.autograd.grad(theirs(*inputs).square().sum(), inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_gradients_per_sample_of_a_captured_bias() -> None:
    inputs, bias = qkv(), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    gradient = torch.func.grad(lambda one: biased(one, *inputs).sin().sum())
    torch.testing.assert_close(torch.vmap(gradient)(bias), torch.stack([gradient(one) for one in bias]))


def test_jacobians() -> None:
    """jacrev differentiates the backward too: by formulas, as its tensors belong to no graph that autograd could be asked for."""
    q, k, v = (tensor.detach() for tensor in qkv())
    wanted = torch.autograd.functional.jacobian(lambda x: theirs(x, k, v), q)
    torch.testing.assert_close(torch.func.jacrev(lambda x: ours(x, k, v))(q), wanted)
    torch.testing.assert_close(torch.autograd.functional.jacobian(lambda x: ours(x, k, v), q, vectorize=True), wanted)


def test_gradients_for_a_batch_of_output_gradients() -> None:
    inputs, bias = qkv(), torch.randn(3, 5, 5, dtype=torch.float64, requires_grad=True)
    out = biased(bias, *inputs)
    gradients = torch.randn(4, *out.shape, dtype=torch.float64)
    wrt = (*inputs, bias)
    found = torch.autograd.grad(out, wrt, gradients, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(out, wrt, gradient, retain_graph=True) for gradient in gradients]
    for i, tensor in enumerate(found):
        torch.testing.assert_close(tensor, torch.stack([each[i] for each in wanted]))


def test_second_derivative_also_batched() -> None:
    inputs = tuple(tensor[:, :2, :3, :2].detach().requires_grad_() for tensor in qkv())
    assert torch.autograd.gradcheck(ours, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, inputs, check_batched_grad=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_second_derivative_with_a_mod_is_refused_where_it_is_asked_for(dropout_p: float) -> None:
    q, k, v = qkv()
    mod = None if dropout_p else (lambda s, b, h, i, j: s * 2)
    out = flex_attention(q, k, v, mod, dropout_p=dropout_p)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0])
    with pytest.raises(NotImplementedError, match="attention: no second derivative with score_mod"):
        first.sum().backward()


def test_second_derivative_through_sink_and_lse() -> None:
    q, k, v = (tensor[:1, :2, :3].detach().requires_grad_() for tensor in qkv())
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def both(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k[:, :1], v[:, :1], scale=0.4, causal=True, sink=sink)[:2]

    assert torch.autograd.gradgradcheck(both, (q, k, v, sink))
