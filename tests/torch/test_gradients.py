# SPDX-License-Identifier: Apache-2.0
"""Gradients of the public function: numeric, analytic, through post-ops, twice, and with compiled autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit import _C, testing
from lowbit.ops.linear import linear
from lowbit.testing import ACTIVATIONS, LinearCase, cached_data


def weight_only(format: str = "int8", group_size: int = 0, **changes: object) -> LinearCase:
    return LinearCase(3, 6, 10, "float32", format, group_size, bias="float32", **changes)


def dense(case: LinearCase) -> Tensor:
    data = cached_data(case)
    n, k, format, group_size, asymmetric, _ = case.op_args
    return torch.ops.lowbit.dequantize(data.packed, n, k, format, group_size, asymmetric)


@pytest.mark.parametrize("case", [weight_only(), weight_only("int4", 32), weight_only("int4", 32, mapping="asymmetric"),
                                  weight_only("float32")], ids=str)  # fmt: skip
def test_gradcheck_of_the_public_function(case: LinearCase) -> None:
    """float32 with a large step: the function is linear in x and bias, so the step adds no error of its own."""
    data = cached_data(case)
    x, bias = data.x.clone().requires_grad_(), data.bias.clone().requires_grad_()
    torch.autograd.gradcheck(
        lambda x, bias: linear(x, data.packed, case.op_args, bias), (x, bias), eps=0.5, atol=1e-3, rtol=1e-3, nondet_tol=0.0
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_gradient_through_the_post_ops_is_that_of_torch(activation: str, dtype: str) -> None:
    case = LinearCase(5, 12, 40, dtype, "int8", 0, "symmetric", "float", "dtype of x", activation, True, True)
    data = cached_data(case)
    ours = [tensor.clone().requires_grad_() for tensor in (data.x, data.bias, data.mul, data.add)]
    theirs = [tensor.double().requires_grad_() for tensor in (data.x, data.bias, data.mul, data.add)]
    y = linear(ours[0], data.packed, case.op_args, ours[1], _C.ACTIVATIONS[activation], ours[2], ours[3])
    from lowbit.reference.linear import ACTIVATIONS as functions

    z = functions[activation](theirs[0] @ dense(case).double().T + theirs[1]) * theirs[2] + theirs[3]
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad)
    z.backward(grad.double())
    tolerance = 32 * testing.ROUNDOFF[dtype]
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=tolerance, atol=tolerance * float(reference.grad.abs().max()))


@pytest.mark.parametrize("format, group_size, x_format", [("int4", 32, "int8_group"), ("int8", 0, "int8_row"), ("int8", 0, "int8_row_asymmetric")])
def test_quantized_activations_use_the_straight_through_gradient(format: str, group_size: int, x_format: str) -> None:
    case = LinearCase(5, 12, 40, "float32", format, group_size, "symmetric", x_format)
    data = cached_data(case)
    x, grad = data.x.clone().requires_grad_(), torch.randn(5, 12)
    linear(x, data.packed, case.op_args).backward(grad)
    torch.testing.assert_close(x.grad, grad @ dense(case))


def test_result_is_the_same_with_and_without_gradients(subtests: pytest.Subtests) -> None:
    for case in (weight_only(), weight_only("int4", 32, x_format="int8_group", activation="silu", add=True)):
        with subtests.test(str(case)):
            data = cached_data(case)
            extra = (_C.ACTIVATIONS[case.activation], data.mul, data.add)
            plain = linear(data.x, data.packed, case.op_args, data.bias, *extra)
            tracked = linear(data.x.clone().requires_grad_(), data.packed, case.op_args, data.bias, *extra)
            assert tracked.requires_grad and not plain.requires_grad
            torch.testing.assert_close(tracked.detach(), plain, rtol=1e-6, atol=1e-6)


def test_no_gradient_is_tracked_when_none_is_wanted() -> None:
    case = weight_only()
    data = cached_data(case)
    x = data.x.clone().requires_grad_()
    with torch.no_grad():
        assert not linear(x, data.packed, case.op_args).requires_grad
    with torch.inference_mode():
        assert not linear(data.x, data.packed, case.op_args).requires_grad


def test_second_derivative_of_a_linear_function_is_zero_and_through_gelu_is_not() -> None:
    case = weight_only()
    data = cached_data(case)
    x = data.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(linear(x, data.packed, case.op_args, None, 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert second.abs().max() > 0


def test_torch_func_grad_and_vmap() -> None:
    case = weight_only()
    data = cached_data(case)

    def loss(x: Tensor) -> Tensor:
        return linear(x, data.packed, case.op_args, data.bias).square().sum()

    x = data.x.clone().requires_grad_()
    loss(x).backward()
    torch.testing.assert_close(torch.func.grad(loss)(data.x), x.grad)
    per_sample = torch.func.vmap(torch.func.grad(loss))(data.x)
    torch.testing.assert_close(per_sample, x.grad)


def test_checkpointing_gives_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    case = weight_only("int4", 32, x_format="int8_group")
    data = cached_data(case)
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        x = data.x.clone().requires_grad_()
        run(lambda x: linear(x, data.packed, case.op_args, data.bias, 4), x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_gradient_from_outside_a_vmap() -> None:
    case = LinearCase(4, 20, 70, format="int4", group_size=32, bias="float32")
    data = cached_data(case)
    x = torch.randn(3, 4, 70, requires_grad=True)
    out = torch.vmap(lambda one: linear(one, data.packed, case.op_args, data.bias))(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    (wanted,) = torch.autograd.grad(linear(x, data.packed, case.op_args, data.bias).sum(), x)
    torch.testing.assert_close(found, wanted)
