# SPDX-License-Identifier: Apache-2.0
"""Gradients of causal_conv1d: every row against autograd through the float64 reference; what has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from test_causal_conv1d import DTYPES, calls, made
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.reference import causal_conv1d as reference

op = torch.ops.lowbit.causal_conv1d_backward
backward_row = fixture_of(testing.rows("causal_conv1d_backward"))
U = testing.ROUNDOFF["float32"]
NAMES = ("x", "weight", "bias", "state")


def gradients(function: Any, call: dict[str, Any], grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Those of all tensors of the call that may have one."""
    leaves = {name: call[name].detach().requires_grad_() for name in NAMES if call[name] is not None}
    results = function(**call | leaves)
    pairs = [(result, grad.to(result.dtype)) for result, grad in zip(results, grads, strict=True)]
    pairs = [(result, grad) for result, grad in pairs if result.requires_grad]
    found = torch.autograd.grad(
        [result for result, _ in pairs], list(leaves.values()), [grad for _, grad in pairs], materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def grads_for(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    y, state = reference.causal_conv1d(**call)
    return torch.randn(y.shape).to(call["x"].dtype), torch.randn(state.shape).to(call["x"].dtype)


def assert_gradients(found: dict[str, Tensor], call: dict[str, Any], grads: tuple[Tensor, Tensor], what: str) -> None:
    """Within the roundings of their sums, and of each to its dtype."""
    wide = {name: call[name].double() for name in NAMES if call[name] is not None}
    wanted = gradients(reference.causal_conv1d, call | wide, grads)
    errors = reference.roundings_of_gradients(**call, grad_y=grads[0], grad_state=grads[1])
    for name, ours in found.items():
        assert ours.dtype == call[name].dtype and ours.shape == call[name].shape
        roundoff, error = testing.ROUNDOFF[str(ours.dtype).removeprefix("torch.")], U * errors[name]
        rounding = roundoff * (wanted[name].abs() + error + torch.finfo(ours.dtype).smallest_normal)
        testing.assert_within(ours, wanted[name], error + rounding + 1e-30, what=f"{what}: gradient of {name}")


@pytest.mark.core
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_row_has_the_gradients_of_the_reference(
    backward_row: str, activation: str | None, subtests: pytest.Subtests
) -> None:
    torch.manual_seed(0)
    for shape, turn, call in calls(activation):
        grads = grads_for(call)
        with subtests.test(shape=shape, turn=turn):
            with forced(backward_row):
                found = gradients(lowbit.causal_conv1d, call, grads)
            assert_gradients(found, call, grads, backward_row)


def test_packed_sequences_have_the_gradients_of_each(backward_row: str) -> None:
    for kept in (3, 5):
        call = made((1, 45, 40, 4)) | {"activation": "silu", "cu_seqlens": torch.tensor([0, 1, 14, 14, 16, 45])}
        call["state"] = torch.randn(5, 40, kept)
        grads = grads_for(call)
        with forced(backward_row):
            found = gradients(lowbit.causal_conv1d, call, grads)
        assert_gradients(found, call, grads, backward_row)


def test_the_bits_do_not_depend_on_threads() -> None:
    for shape in ((3, 200, 300, 4), (1, 900, 200, 3)):
        call = made(shape) | {"activation": "silu"}
        grads = grads_for(call)
        same_for_any_threads(lambda call=call, grads=grads: list(gradients(lowbit.causal_conv1d, call, grads).values()))


def test_any_strides_of_the_gradients() -> None:
    call = made((2, 9, 32, 4), kept=4) | {"activation": "silu"}
    grads = grads_for(call)
    dense = gradients(lowbit.causal_conv1d, call, grads)
    for grad_y in (torch.cat([grads[0]] * 2, -1)[..., :32], grads[0].mT.contiguous().mT):
        strided = gradients(lowbit.causal_conv1d, call, (grad_y, grads[1].mT.contiguous().mT))
        assert all(strided[name].equal(dense[name]) for name in NAMES)


def test_gradients_go_where_they_are_wanted() -> None:
    """Of some tensors alone, through y or the state alone, and without a first state."""
    call = made((2, 20, 24, 4)) | {"activation": "silu"}
    whole = gradients(lowbit.causal_conv1d, call, (torch.ones(2, 20, 24), torch.zeros(2, 24, 3)))
    for name in NAMES:
        leaf = call[name].clone().requires_grad_()
        y, state = lowbit.causal_conv1d(**call | {name: leaf})
        assert torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0].equal(whole[name])
        assert torch.autograd.grad(state.sum(), leaf)[0].any() == (name == "x")
    leaf = call["weight"].clone().requires_grad_()
    y, _ = lowbit.causal_conv1d(call["x"], leaf)
    y.sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.any()
    with torch.no_grad():
        assert not lowbit.causal_conv1d(**call | {"weight": leaf})[0].requires_grad


def test_other_derivatives_are_refused_by_name() -> None:
    call = made((3, 5, 8, 4))
    leaf = call["x"].clone().requires_grad_()
    y, _ = lowbit.causal_conv1d(**call | {"x": leaf})
    with pytest.raises(NotImplementedError, match="the backward of causal_conv1d: no argument may require a gradient"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal_conv1d: no forward-mode derivative"):
        torch.func.jvp(lambda x: lowbit.causal_conv1d(**call | {"x": x})[0], (call["x"],), (call["x"],))
    for x in (call["x"], leaf):
        with pytest.raises(NotImplementedError, match="causal_conv1d: vmap is not supported"):
            torch.vmap(lambda x: lowbit.causal_conv1d(x[None], call["weight"])[0])(x)


def test_under_torch_compile() -> None:
    call = made((1, 30, 24, 4)) | {"activation": "silu"}
    grads = grads_for(call)
    compiled = torch.compile(lowbit.causal_conv1d, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, call, grads)
    for name, grad in gradients(lowbit.causal_conv1d, call, grads).items():
        assert found[name].equal(grad)


def test_an_op_that_is_called_directly_has_its_gradient() -> None:
    call = {name: tensor.requires_grad_() for name, tensor in made((1, 5, 8, 4)).items()}
    y, _ = torch.ops.lowbit.causal_conv1d(*call.values(), True)
    y.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in call.values())


GOOD = made((2, 3, 8, 4)) | {"grad_y": torch.randn(2, 3, 8)}


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 3, 8).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"grad_y": torch.randn(2, 3, 8).half()}, TypeError, "grad_y must be float32, got float16"),
    ({"grad_y": torch.randn(2, 3, 7)}, ValueError, r"grad_y must have shape \[2, 3, 8\], got \[2, 3, 7\]"),
    ({"grad_final_state": torch.randn(2, 8, 4)}, ValueError, r"grad_final_state must have shape \[2, 8, 3\], got \[2, 8, 4\]"),
    ({"grad_final_state": torch.randn(2, 8, 3).half()}, TypeError, "grad_final_state must be float32, got float16"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"causal_conv1d_backward: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    call = made((1, 5, 20, 4), dtype)
    x, weight, bias, state = call.values()
    torch.library.opcheck(
        op.default, (x, weight, torch.randn_like(x), bias, state, torch.randn_like(state), True, None)
    )
    torch.library.opcheck(op.default, (x, weight, torch.randn_like(x)))
    leaves = [tensor.requires_grad_() for tensor in call.values()]
    torch.library.opcheck(torch.ops.lowbit.causal_conv1d.default, (*leaves, True))
