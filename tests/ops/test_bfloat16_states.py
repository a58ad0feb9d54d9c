# SPDX-License-Identifier: Apache-2.0
"""States in bfloat16 of gated_delta_rule, ssd and selective_scan: all is computed in float32, as from the same numbers in
float32, and the new state is rounded once. So rows are held to their own bits with a state in float32."""

from __future__ import annotations

from typing import Any

import pytest
import test_gated_delta_rule as delta
import test_selective_scan as scan
import test_ssd
import torch
from refusals import refused_alike
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing

CALLS = {
    "gated_delta_rule": lambda tokens, dtype: delta.made((2, tokens, 2, 4, 40, 50), dtype),
    "ssd": lambda tokens, dtype: test_ssd.made((2, tokens, 4, 2, 33, 50), dtype),
    "selective_scan": lambda tokens, dtype: scan.made((2, tokens, 48, 3, 17), dtype),
}
ROWS = [(op, row) for op in CALLS for row in testing.rows(op)]
OF_TOKENS = ("q", "k", "v", "g", "beta", "x", "dt", "B", "C", "z")
TENSORS = ("q", "k", "v", "g", "beta", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")


def made(op: str, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same call with a state in bfloat16 and in float32."""
    call = CALLS[op](tokens, dtype)
    state = call["state"].bfloat16()
    return call | {"state": state}, call | {"state": state.float()}


@pytest.mark.core
@pytest.mark.parametrize("op, row", ROWS, ids=[str(row["name"]) for _, row in ROWS])
def test_every_row_rounds_the_new_state_alone(op: str, row: dict[str, object], subtests: pytest.Subtests) -> None:
    if not row["available"]:
        pytest.skip(f"{row['name']}: {row['reason']}")
    torch.manual_seed(0)
    function = getattr(lowbit, op)
    for tokens in (0, 1, 5, 61):
        for dtype in (torch.float32, torch.bfloat16):
            with subtests.test(tokens=tokens, dtype=dtype), forced(str(row["name"])):
                narrow, wide = made(op, tokens, dtype)
                before = narrow["state"].clone()
                y, state = function(**narrow)
                wanted, wanted_state = function(**wide)
                assert y.equal(wanted) and y.dtype is wanted.dtype
                assert state.dtype is torch.bfloat16 and state.equal(wanted_state.bfloat16())
                assert narrow["state"].equal(before)
                if tokens == 0:
                    assert state.equal(before)


@pytest.mark.parametrize("op", ["ssd", "selective_scan"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_state_is_changed_in_place(op: str, tokens: int) -> None:
    function, (call, _) = getattr(lowbit, op), made(op, tokens)
    wanted, wanted_state = function(**call)
    state = call["state"].clone()
    y, same = function(**call | {"state": state}, in_place=True)
    assert same is state and state.equal(wanted_state) and y.equal(wanted)


@pytest.mark.parametrize("op", CALLS)
def test_packed_sequences_and_threads(op: str) -> None:
    function, (call, wide) = getattr(lowbit, op), made(op, 40)
    packed = {name: value.flatten(0, 1)[None] if name in OF_TOKENS else value for name, value in call.items()}
    ends = torch.tensor([0, 40, 80])
    y, state = function(**packed, cu_seqlens=ends)
    wanted, wanted_state = function(**wide)
    assert y.equal(wanted.flatten(0, 1)[None]) and state.equal(wanted_state.bfloat16())
    same_for_any_threads(lambda: function(**call))


@pytest.mark.parametrize("op", CALLS)
def test_gradients_are_those_of_a_state_in_float32(op: str) -> None:
    """That of the first state is rounded once, as that of the last one is given."""
    narrow, wide = made(op, 45)
    torch.manual_seed(0)
    grad_state = torch.randn(narrow["state"].shape).bfloat16()

    def gradients(call: dict[str, Any]) -> dict[str, Tensor]:
        leaves = {name: call[name].detach().requires_grad_() for name in TENSORS if call.get(name) is not None}
        y, state = getattr(lowbit, op)(**call | leaves)
        grads = (torch.ones_like(y), grad_state.to(state.dtype))
        return dict(zip(leaves, torch.autograd.grad((y, state), list(leaves.values()), grads), strict=True))

    ours, wanted = gradients(narrow), gradients(wide)
    assert ours["state"].dtype is torch.bfloat16 and ours["state"].equal(wanted["state"].bfloat16())
    assert all(ours[name].equal(wanted[name]) for name in ours if name != "state")


def test_another_dtype_is_named() -> None:
    for op in CALLS:
        call, _ = made(op, 2)
        limits = {"dt_min": 0.0, "dt_max": 1.0} if "dt_limit" in call else {}
        call = {name: value for name, value in call.items() if name != "dt_limit"} | limits
        for dtype in (torch.float16, torch.float64):
            text = f"{op}: state must be float32 or bfloat16, got {str(dtype).removeprefix('torch.')}"
            refused_alike(getattr(torch.ops.lowbit, op), call | {"state": call["state"].to(dtype)}, TypeError, text)


@pytest.mark.parametrize("op", CALLS)
def test_opcheck(op: str) -> None:
    call, _ = made(op, 5)
    least, most = call.pop("dt_limit", (0.0, 1.0))
    limits = {} if op == "gated_delta_rule" else {"dt_min": least, "dt_max": most}
    torch.library.opcheck(getattr(torch.ops.lowbit, op).default, (), call | limits)
