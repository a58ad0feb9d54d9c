# SPDX-License-Identifier: Apache-2.0
"""master="bf16+8": bfloat16 parameters with 8-bit corrections train like float32 ones, and are saved and loaded whole."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import equal, parameters, run, set_grads

from lowbit import optim

CLASSES: list[Callable[..., torch.optim.Optimizer]] = [
    optim.AdamW8bit, optim.AdamW, optim.AdamW4bit, optim.AdamWFp8, optim.Adam8bit, optim.SGD8bit, optim.Lion8bit,
]  # fmt: skip
MASTER: dict[str, Any] = {"master": "bf16+8"}


def of_bfloat16() -> list[nn.Parameter]:
    return parameters(torch.bfloat16)


@pytest.mark.parametrize("make", CLASSES)
def test_updates_below_half_a_unit_of_bfloat16_train_like_float32(make: Callable[..., torch.optim.Optimizer]) -> None:
    """1000 steps of about 1e-4 of the parameters, where half a unit of bfloat16 is 2e-3 to 4e-3 of them."""
    torch.manual_seed(0)
    start = (torch.rand(64, 128) + 1).bfloat16()
    drift = torch.randn(64, 128)
    ways: dict[str, torch.Tensor] = {}
    for name, dtype, options in (("float32", torch.float32, {}), ("master", torch.bfloat16, MASTER), ("bfloat16", torch.bfloat16, {})):
        p = nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([p], lr=1e-4 if make is not optim.SGD8bit else 1e-5, weight_decay=0.0, **options)
        random = torch.Generator().manual_seed(1)
        for _ in range(1000):
            p.grad = (drift + torch.randn(start.shape, generator=random) / 4).bfloat16().to(dtype)
            optimizer.step()
        ways[name] = optimizer.float32_values(p) - start.float()
    way = ways["float32"].norm()
    assert (ways["master"] - ways["float32"]).norm() < 5e-3 * way
    assert (ways["bfloat16"] - ways["float32"]).norm() > 0.5 * way  # what is lost without a master


@pytest.mark.parametrize("make", CLASSES)
def test_the_parameters_are_the_bfloat16_values_nearest_to_the_whole(make: Callable[..., torch.optim.Optimizer]) -> None:
    params = of_bfloat16()
    optimizer = make(params, lr=0.01, **MASTER)
    run(optimizer, params, 3)
    for p in params:
        assert optimizer.state[p]["correction"].dtype == torch.int8 and optimizer.state[p]["correction"].any()
        whole = optimizer.float32_values(p)
        assert ((whole - p.detach().float()).abs() <= 2.0**-8 * whole.abs()).all()
        at_tie = whole.view(torch.int32) & 0xFFFF == 0x8000  # rounded away from zero, not to even
        assert torch.equal(whole.bfloat16()[~at_tie], p.detach()[~at_tie])


def test_a_float32_parameter_needs_no_correction_and_a_bfloat16_one_beside_it_has_one() -> None:
    mixed, plain = [*parameters()[:2], *of_bfloat16()[2:]], parameters()[:2]
    optimizer, other = optim.AdamW8bit(mixed, lr=0.01, **MASTER), optim.AdamW8bit(plain, lr=0.01)
    run(optimizer, mixed, 3)
    run(other, plain, 3)
    assert equal(mixed[:2], plain)
    assert ["correction" in optimizer.state[p] for p in mixed] == [False, False, True]


def test_no_gradient_moves_nothing_and_zeros_stay_zeros() -> None:
    params = of_bfloat16()
    optimizer = optim.AdamW8bit(params, lr=0.01, weight_decay=0.0, **MASTER)
    run(optimizer, params, 2)
    params[0].data.mul_(torch.arange(128) % 2)  # pruned by hand: corrections are old
    assert optimizer.float32_values(params[0])[:, ::2].abs().max() < 2.0**-133
    for p in params:
        for name in ("exp_avg", "exp_avg_scale"):
            if name in optimizer.state[p]:
                optimizer.state[p][name].zero_() if "scale" in name else optimizer.state[p][name].fill_(127 if p.numel() > 4096 else 0)
        p.grad = torch.zeros_like(p)
    before = [optimizer.float32_values(p) for p in params]
    optimizer.step()
    for p, values in zip(params, before, strict=True):
        assert torch.equal(optimizer.float32_values(p), values)
    assert (params[0][:, ::2] == 0).all()


@pytest.mark.parametrize("make", CLASSES)
def test_a_saved_state_continues_bit_for_bit(make: Callable[..., torch.optim.Optimizer]) -> None:
    params = of_bfloat16()
    optimizer = make(params, lr=0.01, **MASTER)
    run(optimizer, params, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again_params = [nn.Parameter(p.detach().clone()) for p in params]
    again = make(again_params, lr=0.5, **MASTER)
    again.load_state_dict(torch.load(file, weights_only=True))
    twin_params, twin = copy.deepcopy((params, optimizer))
    for each, its in ((optimizer, params), (again, again_params), (twin, twin_params)):
        run(each, its, 2, seed=7)
    assert equal(params, again_params) and equal(params, twin_params)
    for p, q in zip(params, again_params, strict=True):
        assert torch.equal(optimizer.state[p]["correction"], again.state[q]["correction"])


def test_states_without_corrections_begin_at_the_parameters_and_corrections_without_master_are_left_out() -> None:
    params = of_bfloat16()
    plain = optim.AdamW8bit(params, lr=0.01)
    run(plain, params, 2)
    saved = copy.deepcopy(plain.state_dict())
    for group in saved["param_groups"]:
        del group["master"]  # as saved before there were masters
    master = optim.AdamW8bit(params, lr=0.01, **MASTER)
    master.load_state_dict(saved)
    assert not any(master.state[p]["correction"].any() for p in params if "correction" in master.state[p])
    run(master, params, 1)
    with pytest.warns(UserWarning, match="3 corrections are left out, because they need bfloat16 parameters and master"):
        plain.load_state_dict(master.state_dict())
    assert plain.param_groups[0]["master"] is None and "correction" not in plain.state[params[0]]
    run(plain, params, 1)


def test_master_may_be_set_later_and_for_a_group() -> None:
    params = of_bfloat16()
    optimizer = optim.AdamW8bit([{"params": params[:1], **MASTER}, {"params": params[1:]}], lr=0.01)
    run(optimizer, params, 1)
    assert ["correction" in optimizer.state[p] for p in params] == [True, False, False]
    optimizer.param_groups[0]["master"], optimizer.param_groups[1]["master"] = None, "bf16+8"
    run(optimizer, params, 1)
    assert ["correction" in optimizer.state[p] for p in params] == [False, True, True]
    params[1].data = params[1].data.float()
    run(optimizer, params, 1)
    assert ["correction" in optimizer.state[p] for p in params] == [False, False, True]


def test_any_memory_order_and_its_change() -> None:
    straight, turned, apart = (nn.Parameter(torch.randn(70, 65, generator=torch.Generator().manual_seed(2)).bfloat16()) for _ in range(3))
    turned.data = turned.data.t().contiguous().t()
    apart.data = torch.zeros(70, 130, dtype=torch.bfloat16)[:, ::2].copy_(apart.data)
    params = [straight, turned, apart]
    optimizer = optim.AdamW(params, lr=1e-3, **MASTER)
    for seed in range(4):
        grad = torch.randn(70, 65, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for p in params:
            p.grad = grad.clone()
        optimizer.step()
        if seed == 1:
            straight.data = straight.data.t().contiguous().t()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.state_dict()
            assert optimizer.state[straight]["correction"].stride() == straight.stride()
    first = optimizer.float32_values(straight)
    for p in params[1:]:  # thresholds are by the order in memory, so the last bit may differ
        assert (optimizer.float32_values(p) - first).abs().max() < 8 * 2.0**-16 * 4


def test_under_compile_a_step_has_the_same_bits() -> None:
    torch._dynamo.reset()  # steps of other optimizers in this process made sizes symbols
    eager, compiled = of_bfloat16(), of_bfloat16()
    one, other = (optim.AdamW8bit(params, lr=0.01, **MASTER) for params in (eager, compiled))
    step = torch.compile(other.step)
    for seed in range(2):
        set_grads(eager, compiled, seed=seed)
        one.step()
        step()
    assert equal(eager, compiled)
    assert torch.equal(one.state[eager[0]]["correction"], other.state[compiled[0]]["correction"])


def test_offloaded_states_have_the_same_bits() -> None:
    plain, offloaded = of_bfloat16(), of_bfloat16()
    one = optim.AdamW8bit(plain, lr=0.01, **MASTER)
    other = optim.CPUOffloadOptimizer(offloaded, optim.AdamW8bit, lr=0.01, **MASTER)
    run(one, plain, 2)
    run(other, offloaded, 2)
    assert equal(plain, offloaded) and torch.equal(one.state[plain[0]]["correction"], other.state[offloaded[0]]["correction"])


def test_what_master_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Invalid master value: 'bf16', must be one of None, 'bf16\\+8'"):
        optim.AdamW8bit(of_bfloat16(), master="bf16")
    with pytest.raises(ValueError, match="Invalid bf16_stochastic_round value: True, must be False with master='bf16\\+8'"):
        optim.Lion8bit(of_bfloat16(), bf16_stochastic_round=True, **MASTER)
    with pytest.raises(ValueError, match=r"AdamW: parameters must be bfloat16 .* with master='bf16\+8', got .* of torch.float16"):
        optim.AdamW(parameters(torch.float16), **MASTER)
    optimizer = optim.AdamW8bit(of_bfloat16(), lr=0.01, **MASTER)
    with pytest.raises(KeyError, match="param must be a parameter of this optimizer"):
        optimizer.float32_values(torch.zeros(3))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.float(), "correction must be torch.int8, got torch.float32"),
        (lambda t: t[:1], "correction must have shape"),
        (lambda t: "x", "correction must be a tensor, got str"),
    ],
)
def test_a_bad_correction_in_a_state_dict_is_refused(change: Any, message: str) -> None:
    params = of_bfloat16()
    optimizer = optim.AdamW8bit(params, lr=0.01, **MASTER)
    run(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["correction"] = change(saved["state"][1]["correction"])
    with pytest.raises(ValueError, match=f"parameter 1: {message}"):
        optimizer.load_state_dict(saved)
