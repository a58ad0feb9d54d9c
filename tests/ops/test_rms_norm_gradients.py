# SPDX-License-Identifier: Apache-2.0
"""The gradients of rms_norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roundings import assert_close, normalized
from torch import Tensor

from lowbit.ops.rms_norm import rms_norm

K = 96


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("add", [False, True], ids=["no sum", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_has_the_gradients_of_float64(dtype: torch.dtype, add: bool, offset: float) -> None:
    x, weight, term, grad = (
        torch.randn(3, 5, K).to(dtype),
        torch.randn(K).to(dtype),
        torch.randn(3, 5, K).to(dtype),
        torch.randn(3, 5, K).to(dtype),
    )
    x[0, 0] *= 1e-3  # eps matters; its gradient by x is that many times the others, and is compared apart
    inputs = [each.requires_grad_() for each in ([x, weight, term] if add else [x, weight])]
    y = rms_norm(x, weight, 1e-6, offset=offset, add=term if add else None)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact = normalized(wide[0], wide[1], offset) + (wide[2] if add else 0)
    found = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
    roundings = K if dtype is torch.float32 else 2
    for row in range(15):
        assert_close([found[1].view(15, K)[row]], [wanted[1].view(15, K)[row]], roundings, dtype)
    assert_close([found[0], *found[2:]], [wanted[0], *wanted[2:]], roundings, dtype)


def test_one_row_has_gradients() -> None:
    x, weight, grad = torch.randn(K).requires_grad_(), torch.randn(K).requires_grad_(), torch.randn(K)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6), [x, weight], grad)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    assert_close(list(found), list(torch.autograd.grad(normalized(*wide, 0.0), wide, grad.double())), K)


def test_other_ways_to_a_gradient() -> None:
    x, weight, grad = torch.randn(3, K).requires_grad_(), torch.randn(K).bfloat16(), torch.randn(3, K)
    wanted = torch.autograd.grad(rms_norm(x, weight, 1e-6), x, grad)[0]
    wide = x.detach().double().requires_grad_()
    assert_close([wanted], list(torch.autograd.grad(normalized(wide, weight.double(), 0.0), wide, grad.double())), K)
    compiled = torch.compile(lambda x: rms_norm(x, weight, 1e-6), backend="aot_eager", fullgraph=True)
    assert torch.autograd.grad(compiled(x), x, grad)[0].equal(wanted)
    assert torch.func.grad(lambda x: (rms_norm(x, weight, 1e-6) * grad).sum())(x.detach()).equal(wanted)
    with pytest.raises(NotImplementedError, match="rms_norm: vmap is not supported"):
        torch.func.vmap(lambda x: rms_norm(x, weight, 1e-6))(x)


def test_rms_norm_can_be_differentiated_twice() -> None:
    x, weight = torch.randn(3, 7, dtype=torch.float32).requires_grad_(), torch.randn(7).requires_grad_()

    def second_order(function: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(function(x, weight).square().sum(), [x, weight], create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), [x, weight]))

    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    wanted = second_order(lambda x, weight: normalized(x, weight, 1.0), *wide)
    assert_close(second_order(lambda x, weight: rms_norm(x, weight, offset=1.0), x, weight), wanted, 200)
