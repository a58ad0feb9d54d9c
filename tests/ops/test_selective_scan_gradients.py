# SPDX-License-Identifier: Apache-2.0
"""Gradients of selective_scan: every row against autograd through the float64 reference; what has none."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from recurrent_gradients import assert_gradients, gradients
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.reference import selective_scan as reference

op = torch.ops.lowbit.selective_scan_backward
backward_row = fixture_of(testing.rows("selective_scan_backward"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
SHAPES = [
    (1, 1, 1, 1, 1), (2, 1, 34, 2, 16), (1, 32, 32, 1, 16), (1, 33, 35, 1, 33), (2, 70, 40, 2, 15), (1, 100, 600, 1, 5),
    (2, 0, 8, 1, 8), (0, 3, 8, 1, 8),
]  # fmt: skip
"""B, T, D, G, S; states are kept every 32 tokens, and 600 channels are added in 13 parts."""
OPTIONS: dict[str, dict[str, Any]] = {
    "softplus": {"softplus": True},
    "bare": {},
    "limited": {"softplus": True, "dt_limit": (0.05, 0.5)},
}


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    batch, tokens, channels, groups, s = shape
    torch.manual_seed(0)
    return {
        "x": torch.randn(batch, tokens, channels).to(dtype),
        "dt": torch.randn(batch, tokens, channels).to(dtype),
        "A": -torch.rand(channels, s) * 2,
        "B": (torch.randn(batch, tokens, groups, s) / s**0.5).to(dtype),
        "C": torch.randn(batch, tokens, groups, s).to(dtype),
        "D": torch.randn(channels),
        "z": torch.randn(batch, tokens, channels).to(dtype),
        "dt_bias": torch.randn(channels) - 2,
        "state": torch.randn(batch, channels, s),
    }


@pytest.mark.core
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_has_the_gradients_of_the_reference(backward_row: str, name: str, subtests: pytest.Subtests) -> None:
    options = OPTIONS[name]
    for number, shape in enumerate(SHAPES):
        call = made(shape, DTYPES[number % 3])
        if not options:
            call = {key: tensor for key, tensor in call.items() if key not in ("D", "z", "dt_bias", "state")}
        grads = (
            torch.randn(call["x"].shape).to(call["x"].dtype),
            torch.randn(shape[0], shape[2], shape[4]) if number % 2 else None,
        )
        with subtests.test(shape=shape):
            with forced(backward_row):
                found = gradients(call, options, grads, lowbit.selective_scan, False)
            wanted = gradients(call, options, grads, reference.selective_scan, True)
            assert_gradients(found, wanted, shape[1] + shape[2] + shape[4], backward_row)


def test_packed_sequences_have_the_gradients_of_each(backward_row: str) -> None:
    call = made((1, 75, 40, 2, 20)) | {"state": torch.randn(4, 40, 20)}
    grads = torch.randn(call["x"].shape), torch.randn(4, 40, 20)
    options = {"softplus": True, "cu_seqlens": torch.tensor([0, 1, 26, 26, 75])}
    with forced(backward_row):
        found = gradients(call, options, grads, lowbit.selective_scan, False)
    assert_gradients(found, gradients(call, options, grads, reference.selective_scan, True), 140, backward_row)


def test_strong_decays_have_finite_gradients(backward_row: str) -> None:
    call = made((1, 60, 32, 1, 16))
    call["dt"][:, ::3], call["dt"][:, 1::7] = 60, -200
    grads = torch.randn(call["x"].shape), torch.randn(call["state"].shape)
    with forced(backward_row):
        found = gradients(call, {"softplus": True}, grads, lowbit.selective_scan, False)
    wanted = gradients(call, {"softplus": True}, grads, reference.selective_scan, True)
    assert_gradients(found, wanted, 60 * 60, backward_row)  # delta is 60 for a third of them


def test_gradcheck() -> None:
    """By differences of results in float32: large steps, and a budget to match."""
    call = {name: tensor.requires_grad_() for name, tensor in made((1, 4, 3, 1, 2)).items()}
    run = lambda *tensors: lowbit.selective_scan(**dict(zip(NAMES, tensors, strict=True)), softplus=True)  # noqa: E731
    assert torch.autograd.gradcheck(run, tuple(call.values()), eps=1e-2, atol=2e-2, rtol=2e-2)


def test_the_bits_do_not_depend_on_threads() -> None:
    call = made((2, 150, 640, 2, 16))
    grads = torch.randn(call["x"].shape), torch.randn(call["state"].shape)
    function = partial(gradients, call, {"softplus": True}, grads, lowbit.selective_scan, False)
    same_for_any_threads(lambda: list(function().values()))


def test_gradients_go_where_they_are_wanted() -> None:
    """Of some tensors alone, through y or the state alone, and without D, a gate, a bias and a first state."""
    call = made((1, 40, 24, 1, 8))
    whole = gradients(call, {}, (torch.ones(1, 40, 24), torch.zeros(1, 24, 8)), lowbit.selective_scan, False)
    for name in NAMES:
        leaf = call[name].clone().requires_grad_()
        y, state = lowbit.selective_scan(**call | {name: leaf})
        assert torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0].equal(whole[name])
        assert torch.autograd.grad(state.sum(), leaf)[0].any() == (name not in ("C", "D", "z"))
    leaf = call["B"].clone().requires_grad_()
    y, state = lowbit.selective_scan(**call | {"B": leaf, "state": None, "D": None, "z": None, "dt_bias": None})
    (y.sum() + state.sum()).backward()
    assert leaf.grad.isfinite().all()
    with torch.no_grad():
        assert not lowbit.selective_scan(**call | {"B": leaf})[0].requires_grad


def test_the_memory_of_a_backward_is_that_of_its_tensors() -> None:
    """Saved for the backward are the arguments alone, whatever the number of tokens."""
    call = {name: tensor.requires_grad_() for name, tensor in made((1, 200, 32, 1, 16)).items()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        lowbit.selective_scan(**call, softplus=True)
    given = {tensor.data_ptr() for tensor in call.values()}
    assert saved and all(tensor.data_ptr() in given for tensor in saved)


def test_other_derivatives_are_refused_by_name() -> None:
    call = made((1, 5, 8, 1, 8))
    leaf = call["x"].clone().requires_grad_()
    y, _ = lowbit.selective_scan(**call | {"x": leaf})
    with pytest.raises(NotImplementedError, match="the backward of selective_scan"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="selective_scan: no forward-mode derivative"):
        torch.func.jvp(lambda x: lowbit.selective_scan(**call | {"x": x})[0], (call["x"],), (call["x"],))
    with pytest.raises(NotImplementedError, match="selective_scan: no vmap"):
        torch.func.vmap(lambda x: lowbit.selective_scan(**call | {"x": x})[0])(call["x"][None])
    with pytest.raises(
        NotImplementedError, match="selective_scan with in_place=True: no argument may require a gradient"
    ):
        lowbit.selective_scan(**call | {"x": leaf}, in_place=True)


def test_under_torch_compile() -> None:
    call = made((1, 30, 32, 1, 16))
    grads = torch.randn(call["x"].shape), torch.randn(call["state"].shape)
    compiled = torch.compile(lowbit.selective_scan, fullgraph=True, backend="aot_eager")
    found = gradients(call, {"softplus": True}, grads, compiled, False)
    for name, grad in gradients(call, {"softplus": True}, grads, lowbit.selective_scan, False).items():
        assert found[name].equal(grad)


def test_an_op_that_is_called_directly_has_its_gradient() -> None:
    call = {name: tensor.requires_grad_() for name, tensor in made((1, 5, 8, 1, 8)).items()}
    x, dt, a, b, c, *rest = call.values()
    y, _ = torch.ops.lowbit.selective_scan(x, dt, a, b, c, 0.0, math.inf, *rest, True)
    y.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in call.values())


GOOD = made((2, 3, 8, 2, 6)) | {"grad_y": torch.randn(2, 3, 8), "dt_min": 0.0, "dt_max": 1.0}


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 3, 8).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"grad_y": torch.randn(2, 3, 8).half()}, TypeError, "grad_y must be float32, got float16"),
    ({"grad_y": torch.randn(2, 3, 5)}, ValueError, r"grad_y must have shape \[2, 3, 8\], got \[2, 3, 5\]"),
    ({"grad_final_state": torch.randn(2, 6, 8)}, ValueError, r"grad_final_state must have shape \[2, 8, 6\]"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"selective_scan_backward: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, dt, a, b, c, d, z, bias, state = made((1, 5, 8, 2, 6), dtype).values()
    grad_y = torch.randn(x.shape).to(dtype)
    torch.library.opcheck(
        op.default, (x, dt, a, b, c, grad_y, 0.0, 1.0, d, z, bias, state, torch.randn(state.shape), True)
    )
    torch.library.opcheck(op.default, (x, dt, a, b, c, grad_y, 0.0, 1.0))
    leaves = [tensor.requires_grad_() for tensor in (x, dt, a, b, c, d, z, bias, state)]
    torch.library.opcheck(torch.ops.lowbit.selective_scan.default, (*leaves[:5], 0.0, 1.0, *leaves[5:], True))
