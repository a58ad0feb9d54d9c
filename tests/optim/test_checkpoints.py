# SPDX-License-Identifier: Apache-2.0
"""State dicts: our own continue bit for bit; those of torch, torchao and bitsandbytes (the real packages) are taken over."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.optim
from torch import nn
from twins import Case, copies, equal, parameters, run, states

from lowbit import optim
from lowbit.optim.state_format import Layout, decode


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def moment(optimizer: torch.optim.Optimizer, p: nn.Parameter, name: str, is_signed: bool) -> torch.Tensor:
    group = optimizer.param_groups[0]
    state = optimizer.state[p]
    scale = state.get(f"{name}_scale")
    return decode(state[name], scale, Layout.of(p, group["state_format"] if scale is not None else "float32", group["block_size"]), is_signed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_goes_on_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = case.make(params, lr=0.01)
    run(optimizer, params, 3)
    resumed = copies(params)
    other = case.make(resumed, lr=0.5)
    other.load_state_dict(saved(optimizer))
    for state, loaded in zip(states(optimizer), states(other), strict=True):
        assert {name: t.dtype for name, t in state.items()} == {name: t.dtype for name, t in loaded.items()}
    run(optimizer, params, 3, seed=9)
    run(other, resumed, 3, seed=9)
    assert equal(params, resumed)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit_and_apart(case: Case, clone: Any) -> None:
    params = parameters()
    optimizer = case.make(params, lr=0.01)
    run(optimizer, params, 2)
    twin_params, twin = clone((params, optimizer))
    run(twin, twin_params, 2, seed=4)
    assert not equal(params, twin_params)
    run(optimizer, params, 2, seed=4)
    assert equal(params, twin_params)


def test_loading_does_not_share_memory_with_the_state_dict() -> None:
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    run(optimizer, params, 1)
    state_dict = optimizer.state_dict()
    other = optim.AdamW8bit(copies(params))
    other.load_state_dict(state_dict)
    addresses = {t.data_ptr() for state in state_dict["state"].values() for t in state.values()}
    assert not addresses & {t.data_ptr() for state in states(other) for t in state.values()}


def test_hooks_of_loading_see_plain_tensors() -> None:
    params, seen = parameters(), []
    optimizer = optim.AdamW8bit(params)
    run(optimizer, params, 1)
    other = optim.AdamW8bit(copies(params))
    other.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict["state"][0]["exp_avg"].dtype))
    other.register_load_state_dict_post_hook(lambda loaded: seen.append(states(loaded)[0]["exp_avg"].dtype))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [torch.uint8, torch.uint8]


def test_state_of_torch_is_encoded() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=0.01)
    run(theirs, params, 3)
    ours = optim.AdamW8bit(copies(params))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01 and ours.param_groups[0]["state_format"] == "dynamic8"
    p, q = params[0], ours.param_groups[0]["params"][0]
    got, expected = moment(ours, q, "exp_avg", True), theirs.state[p]["exp_avg"]
    assert (got - expected).abs().max() <= expected.abs().max() * 0.9 / 64 / 2 * 1.01  # half of the widest bin
    assert float(ours.state[q]["step"]) == 3
    assert torch.equal(ours.state[ours.param_groups[0]["params"][2]]["exp_avg"], theirs.state[params[2]]["exp_avg"])  # small: float32


@pytest.mark.parametrize(("name", "make"), [("AdamW8bit", optim.AdamW8bit), ("AdamW", optim.AdamW), ("AdamW4bit", optim.AdamW4bit)])
def test_bitsandbytes_state_is_taken_over(name: str, make: Any) -> None:
    params = parameters()
    theirs = bitsandbytes.optim.AdamW8bit(params, lr=0.01)
    run(theirs, params, 3)
    ours = make(copies(params), lr=1.0)
    ours.load_state_dict(saved(theirs))
    p, q = params[0], ours.param_groups[0]["params"][0]
    state, loaded = theirs.state[p], ours.state[q]
    assert float(loaded["step"]) == 3 and ours.param_groups[0]["lr"] == 0.01
    if name == "AdamW8bit":
        assert torch.equal(loaded["exp_avg"], state["state1"]) and torch.equal(loaded["exp_avg_sq"], state["state2"])
        assert torch.equal(loaded["exp_avg_scale"], state["absmax1"]) and torch.equal(loaded["exp_avg_sq_scale"], state["absmax2"])
    table = state["qmap1"][state["state1"].long()] * state["absmax1"].repeat_interleave(256).view(64, 128)
    got = moment(ours, q, "exp_avg", True)
    if name == "AdamW4bit":
        assert (got - table).norm() <= 0.3 * table.norm()
    else:
        torch.testing.assert_close(got, table, rtol=1e-6, atol=0)
    run(ours, ours.param_groups[0]["params"], 2)


@pytest.mark.parametrize(
    ("theirs_name", "make", "block_size"),
    [("OptimState8bit", optim.AdamW8bit, 256), ("OptimState4bit", optim.AdamW4bit, 128), ("OptimStateFp8", optim.AdamWFp8, 256)],
)
def test_torchao_state_is_taken_over(theirs_name: str, make: Any, block_size: int) -> None:
    # torchao's step needs a C++ compiler and 12 s per shape: the states are its real classes, filled as its step fills them
    module = {"OptimState8bit": "subclass_8bit", "OptimState4bit": "subclass_4bit", "OptimStateFp8": "subclass_fp8"}[theirs_name]
    zeros = getattr(__import__(f"torchao.optim.{module}", fromlist=[theirs_name]), theirs_name).zeros
    p = nn.Parameter(torch.randn(64, 128))
    optimizer = {"OptimState8bit": torchao.optim.AdamW8bit, "OptimState4bit": torchao.optim.AdamW4bit, "OptimStateFp8": torchao.optim.AdamWFp8}[
        theirs_name
    ]([p], lr=0.01)
    values = {"exp_avg": torch.randn(64, 128) * 1e-3, "exp_avg_sq": torch.rand(64, 128) * 1e-6}
    optimizer.state[p]["step"] = torch.tensor(7.0)
    for name, value in values.items():
        args = (value.shape, block_size) if "Fp8" in theirs_name else (value.shape, name == "exp_avg", block_size)
        optimizer.state[p][name] = zeros(*args).copy_(value)
    q = nn.Parameter(p.detach().clone())
    ours = make([q], block_size=block_size)
    ours.load_state_dict(optimizer.state_dict())
    assert float(ours.state[q]["step"]) == 7 and float(ours.param_groups[0]["lr"]) == pytest.approx(0.01)
    for name in values:
        theirs = optimizer.state[p][name]
        assert torch.equal(ours.state[q][name].view(-1), theirs.codes.view(torch.uint8).view(-1))
        torch.testing.assert_close(moment(ours, q, name, name == "exp_avg"), theirs.dequantize().float(), rtol=1e-6, atol=0)
    run(ours, [q], 2)


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    run(optimizer, params, 1)
    before = copy.deepcopy(optimizer.state_dict())
    good = copy.deepcopy(before)

    def refused(change: Any, error: type[Exception], match: str) -> None:
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(error, match=match):
            optimizer.load_state_dict(bad)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, state in before["state"].items():
            assert all(torch.equal(value, after["state"][index][name]) for name, value in state.items())

    refused(lambda bad: bad["state"][0].pop("exp_avg_sq"), ValueError, "AdamW8bit.load_state_dict: parameter 0.* exp_avg_sq")
    refused(lambda bad: bad["state"][0].update(exp_avg=torch.zeros(7, dtype=torch.uint8)), ValueError, r"exp_avg must have shape \[64, 128\], got \[7\]")
    refused(lambda bad: bad["state"][1].update(exp_avg_scale=torch.zeros(3)), ValueError, r"parameter 1: exp_avg: scales .* must have shape \[24\], got \[3\]")
    refused(lambda bad: bad["param_groups"].pop(), ValueError, "different number of parameter groups")
