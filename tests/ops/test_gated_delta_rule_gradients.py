# SPDX-License-Identifier: Apache-2.0
"""Gradients of gated_delta_rule: every row against autograd through the float64 reference; what has none."""

from __future__ import annotations

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
from lowbit.reference import linear_attention as reference

op = torch.ops.lowbit.gated_delta_rule_backward
backward_row = fixture_of(testing.rows("gated_delta_rule_backward"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("q", "k", "v", "g", "beta", "state")
SHAPES = [
    (1, 1, 1, 1, 1, 1), (2, 1, 1, 2, 16, 16), (1, 12, 1, 1, 16, 32), (1, 13, 1, 3, 33, 35), (2, 25, 2, 2, 15, 17),
    (1, 61, 1, 2, 24, 20), (1, 130, 2, 4, 64, 48), (2, 0, 1, 1, 8, 8),
]  # fmt: skip
"""B, T, Hk, Hv, Dk, Dv; states are kept every 60 tokens."""


def made(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, per_channel: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    batch, tokens, key_heads, heads, dk, dv = shape
    torch.manual_seed(seed)
    of_g = (batch, tokens, heads, dk) if per_channel else (batch, tokens, heads)
    return {
        "q": torch.randn(batch, tokens, key_heads, dk).to(dtype),
        "k": (torch.randn(batch, tokens, key_heads, dk) / dk**0.5).to(dtype),
        "v": torch.randn(batch, tokens, heads, dv).to(dtype),
        "g": -torch.rand(of_g) * 0.3,
        "beta": torch.rand(batch, tokens, heads).to(dtype),
        "state": torch.randn(batch, heads, dk, dv),
    }


@pytest.mark.core
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_every_row_has_the_gradients_of_the_reference(
    backward_row: str, per_channel: bool, l2norm: bool, subtests: pytest.Subtests
) -> None:
    for number, shape in enumerate(SHAPES):
        call = made(shape, DTYPES[number % 3], per_channel=per_channel)
        options = {"l2norm": l2norm, "scale": 0.5}
        grads = (
            torch.randn(call["v"].shape).to(call["v"].dtype),
            torch.randn(call["state"].shape) if number % 2 else None,
        )
        with subtests.test(shape=shape):
            with forced(backward_row):
                found = gradients(call, options, grads, lowbit.gated_delta_rule, False)
            wanted = gradients(call, options, grads, reference.gated_delta_rule, True)
            assert_gradients(found, wanted, shape[1], backward_row)


def test_packed_sequences_have_the_gradients_of_each(backward_row: str) -> None:
    ends = torch.tensor([0, 1, 14, 14, 45])
    call = made((1, 45, 1, 2, 24, 20)) | {"state": torch.randn(4, 2, 24, 20)}
    grads = torch.randn(call["v"].shape), torch.randn(4, 2, 24, 20)
    options = {"l2norm": True, "cu_seqlens": ends}
    with forced(backward_row):
        found = gradients(call, options, grads, lowbit.gated_delta_rule, False)
    assert_gradients(found, gradients(call, options, grads, reference.gated_delta_rule, True), 45, backward_row)


def test_strong_decays_and_padding_have_finite_gradients(backward_row: str) -> None:
    for per_channel in (False, True):
        call = made((1, 40, 1, 1, 16, 16), per_channel=per_channel)
        call["g"][:, ::3] = -60
        call["g"][:, :13], call["beta"][:, :13], call["k"][:, :5] = 0, 0, 0
        grads = torch.randn(call["v"].shape), torch.randn(call["state"].shape)
        with forced(backward_row):
            found = gradients(call, {"l2norm": True}, grads, lowbit.gated_delta_rule, False)
        wanted = gradients(call, {"l2norm": True}, grads, reference.gated_delta_rule, True)
        assert_gradients(
            {name: found[name] for name in NAMES if name != "k"},
            {name: wanted[name] for name in NAMES if name != "k"},
            40,
            backward_row,
        )
        rest = found["k"][:, 5:], wanted["k"][:, 5:]  # those of zeros are 1000 times as large: 1 / sqrt(epsilon)
        assert_gradients({"k": rest[0]}, {"k": rest[1]}, 40, backward_row)
        torch.testing.assert_close(found["k"][:, :5].double(), wanted["k"][:, :5], rtol=1e-4, atol=1e-2)


def test_the_bits_do_not_depend_on_threads() -> None:
    for per_channel in (False, True):
        call = made((2, 130, 2, 4, 32, 32), per_channel=per_channel)
        grads = torch.randn(call["v"].shape), torch.randn(call["state"].shape)
        function = partial(gradients, call, {"l2norm": True}, grads, lowbit.gated_delta_rule, False)
        same_for_any_threads(lambda function=function: list(function().values()))


def test_gradients_go_where_they_are_wanted() -> None:
    """Of some tensors alone, through o or the state alone, and without a first state."""
    call = made((1, 20, 1, 2, 16, 8))
    whole = gradients(call, {}, (torch.ones(1, 20, 2, 8), torch.zeros(1, 2, 16, 8)), lowbit.gated_delta_rule, False)
    for name in NAMES:
        leaf = call[name].clone().requires_grad_()
        out, state = lowbit.gated_delta_rule(**call | {name: leaf})
        assert torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0].equal(whole[name])
        assert torch.autograd.grad(state.sum(), leaf)[0].any() == (name != "q")
    leaf = call["k"].clone().requires_grad_()
    out, state = lowbit.gated_delta_rule(**call | {"k": leaf, "state": None})
    (out.sum() + state.sum()).backward()
    assert leaf.grad.isfinite().all()
    with torch.no_grad():
        assert not lowbit.gated_delta_rule(**call | {"k": leaf})[0].requires_grad


def test_other_derivatives_are_refused_by_name() -> None:
    call = made((1, 5, 1, 1, 8, 8))
    leaf = call["q"].clone().requires_grad_()
    out, _ = lowbit.gated_delta_rule(**call | {"q": leaf})
    with pytest.raises(NotImplementedError, match="the backward of gated_delta_rule"):
        torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_delta_rule: no forward-mode derivative"):
        torch.func.jvp(lambda q: lowbit.gated_delta_rule(**call | {"q": q})[0], (call["q"],), (call["q"],))


def test_under_torch_compile() -> None:
    call = made((1, 30, 1, 2, 16, 16))
    grads = torch.randn(call["v"].shape), torch.randn(call["state"].shape)
    compiled = torch.compile(lowbit.gated_delta_rule, fullgraph=True, backend="aot_eager")
    found = gradients(call, {"l2norm": True}, grads, compiled, False)
    for name, grad in gradients(call, {"l2norm": True}, grads, lowbit.gated_delta_rule, False).items():
        assert found[name].equal(grad)


def test_an_op_that_is_called_directly_has_its_gradient() -> None:
    call = {name: tensor.requires_grad_() for name, tensor in made((1, 5, 1, 1, 8, 8)).items()}
    out, _ = torch.ops.lowbit.gated_delta_rule(*call.values(), True, 0.5)
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in call.values())


GOOD = made((2, 3, 2, 4, 8, 6)) | {"grad_o": torch.randn(2, 3, 4, 6)}


@pytest.mark.parametrize("change, error, text", [
    ({"q": torch.randn(2, 3, 2, 8).double()}, TypeError, "q must be float32, bfloat16 or float16, got float64"),
    ({"grad_o": torch.randn(2, 3, 4, 6).half()}, TypeError, "grad_o must be float32, got float16"),
    ({"grad_o": torch.randn(2, 3, 4, 5)}, ValueError, r"grad_o must have shape \[2, 3, 4, 6\], got \[2, 3, 4, 5\]"),
    ({"grad_final_state": torch.randn(2, 4, 6, 8)}, ValueError, r"grad_final_state must have shape \[2, 4, 8, 6\]"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"gated_delta_rule_backward: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
def test_opcheck(dtype: torch.dtype, per_channel: bool) -> None:
    call = made((1, 5, 1, 2, 8, 6), dtype, per_channel=per_channel)
    state = call.pop("state")
    torch.library.opcheck(
        op.default, (*call.values(), torch.randn(1, 5, 2, 6).to(dtype), state, torch.randn(1, 2, 8, 6), True, 0.5, None)
    )
    leaves = [tensor.requires_grad_() for tensor in (*call.values(), state)]
    torch.library.opcheck(torch.ops.lowbit.gated_delta_rule.default, (*leaves, True, 0.5))
