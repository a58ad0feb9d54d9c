# SPDX-License-Identifier: Apache-2.0
"""The bias: added before the one rounding whether or not anything is trained, of any strides, with any gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit import testing
from lowbit.ops.linear import linear
from lowbit.testing import LinearCase

CASE = LinearCase(6, 20, 70, format="int8")


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    packed = testing.pack_weight(torch.randn(20, 70, generator=generator), "int8")
    return torch.randn(6, 70, generator=generator).to(dtype), packed


@pytest.mark.parametrize("grad_x, grad_bias", itertools.product((False, True), repeat=2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [0, 4])
def test_what_wants_a_gradient_does_not_change_the_result(dtype, bias_dtype, activation, grad_x, grad_bias):
    """Bit for bit; torch applies an activation to the rounded sum, so there a rounding is allowed."""
    x, packed = data(dtype)
    u = testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    bias = (-(x.float() @ testing.decode_weight(packed, 20, 70, "int8", 0, "symmetric").decode().float().T)[0]).to(
        bias_dtype
    )  # cancels
    with torch.no_grad():
        wanted = linear(x, packed, CASE.op_args, bias, activation)
    y = linear(
        x.clone().requires_grad_(grad_x), packed, CASE.op_args, bias.clone().requires_grad_(grad_bias), activation
    )
    assert y.requires_grad == (grad_x or grad_bias) and y.dtype == dtype
    if activation and y.requires_grad:
        torch.testing.assert_close(y, wanted, rtol=4 * u, atol=2 * u * wanted.abs().max().item())
    else:
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("grad_x, grad_bias", itertools.product((False, True), repeat=2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda b: b.repeat_interleave(2)[::2], lambda b: b[:1].expand(20)], ids=["step", "expanded"]
)
def test_a_bias_of_any_strides_with_any_gradient(dtype, make, grad_x, grad_bias):
    x, packed = data(dtype)
    bias = make(torch.randn(20))
    wanted = linear(x, packed, CASE.op_args, bias.contiguous())
    leaf = bias.detach().requires_grad_(grad_bias)
    y = linear(x.clone().requires_grad_(grad_x), packed, CASE.op_args, leaf)
    assert torch.equal(y, wanted)
    if grad_bias:
        (grad,) = torch.autograd.grad(y.float().sum(), leaf)
        torch.testing.assert_close(grad, torch.full((20,), 6.0))


@pytest.mark.parametrize("grad_x, grad_bias", itertools.product((False, True), repeat=2))
@pytest.mark.parametrize("shape", [(1,), (), (21,), (1, 20), (6, 20)], ids=str)
def test_a_bias_of_another_shape_is_refused_and_never_spread(shape, grad_x, grad_bias):
    x, packed = data(torch.float32)
    with pytest.raises(ValueError, match=r"linear: bias must be a contiguous \[n=20\], got \["):
        linear(x.clone().requires_grad_(grad_x), packed, CASE.op_args, torch.zeros(shape, requires_grad=grad_bias))


@pytest.mark.parametrize("grad_x, grad_bias", itertools.product((False, True), repeat=2))
def test_a_float64_bias_is_refused_whether_or_not_it_is_trained(grad_x, grad_bias):
    x, packed = data(torch.float32)
    bias = torch.zeros(20, dtype=torch.float64, requires_grad=grad_bias)
    with pytest.raises(TypeError, match="linear: bias must be float32, bfloat16 or float16, got float64"):
        linear(x.clone().requires_grad_(grad_x), packed, CASE.op_args, bias)
