# SPDX-License-Identifier: Apache-2.0
"""step() as torch's optimizers do it: against the twin, with every option that torch's have, and what must not happen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from settings import same_for_any_threads
from torch import nn
from twins import CASES, Case, copies, equal, parameters, run, set_grads, states

import lowbit
from lowbit import _C, optim
from lowbit.testing import ROUNDOFF

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.1},
    {"lr": torch.tensor(0.01)},
    {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-4},
    {"lr": 0.01, "nesterov": True, "weight_decay": 0.1},
    {"lr": 0.01, "dampening": 0.5},
    {"lr": 0.01, "momentum": 0.0},
]


def accepts(case: Case, options: dict[str, Any]) -> bool:
    groups = [make([nn.Parameter(torch.zeros(1))]).param_groups[0] for make in (case.make, case.twin)]
    return all(set(options) <= set(group) for group in groups)


@pytest.mark.parametrize("case, options", [(case, options) for case in CASES for options in OPTIONS if accepts(case, options)], ids=str)
def test_twenty_steps_stay_with_the_torch_twin(case: Case, options: dict[str, Any]) -> None:
    ours = parameters()
    theirs, start = copies(ours), copies(ours)
    mine, twin = case.make(ours, **options), case.twin(theirs, **options)
    for i in range(20):
        set_grads(ours, theirs, seed=i)
        mine.step()
        twin.step()
    for p, q, s in zip(ours, theirs, start, strict=True):
        rounding = 20 * ROUNDOFF["float32"] * q.norm()  # torch rounds p (1 - lr weight_decay) before it adds to it; here both are one FMA
        assert (p - q).norm() <= (case.drift if p.numel() >= 4096 or "bf16" in case.name else 1e-5) * (q - s).norm() + rounding


def test_lr_of_zero_moves_no_parameter(case: Case) -> None:
    params = parameters()
    before = copies(params)
    optimizer = case.make(params, lr=0.0)
    for seed in range(2):
        set_grads(params, seed=seed)
        for p in params:
            p.grad.view(-1)[::3] = 0  # moments of zero too: AdamW divides by the root over lr
        optimizer.step()
    assert equal(params, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_move_as_float32_ones_would(case: Case, dtype: torch.dtype) -> None:
    half = parameters(dtype)
    full = [nn.Parameter(p.detach().float()) for p in half]
    set_grads(full, half)
    for p, q in zip(full, half, strict=True):
        p.grad = q.grad.float()
    case.make(full, lr=0.01).step()
    case.make(half, lr=0.01).step()
    for p, q in zip(full, half, strict=True):
        assert torch.equal(p.to(dtype), q)


def test_states_are_codes_where_a_parameter_is_large_enough_and_float32_elsewhere() -> None:
    params = parameters()
    optimizer = optim.AdamW8bit(params)
    run(optimizer, params, 1)
    large, odd, small = states(optimizer)
    assert large["exp_avg"].dtype == large["exp_avg_sq"].dtype == torch.uint8 and large["exp_avg"].shape == (64, 128)
    assert large["exp_avg_scale"].shape == (32,) and odd["exp_avg_scale"].shape == (-(-83 * 71 // 256),)
    assert small["exp_avg"].dtype == torch.float32 and "exp_avg_scale" not in small
    assert [float(state["step"]) for state in (large, odd, small)] == [1, 1, 1]


@pytest.mark.parametrize(
    "make, promised",
    [
        (optim.AdamW8bit, 2 * (1 + 4 / 256)), (optim.AdamWFp8, 2 * (1 + 4 / 256)), (optim.AdamW4bit, 2 * (0.5 + 4 / 128)),
        (optim.SGD8bit, 1 + 4 / 256), (optim.Lion8bit, 1 + 4 / 256),
    ],
)  # fmt: skip
def test_bytes_of_states_are_those_promised(make: Any, promised: float) -> None:
    p = nn.Parameter(torch.randn(256, 256))
    p.grad = torch.randn_like(p)
    optimizer = make([p])
    optimizer.step()
    assert sum(t.nbytes for name, t in optimizer.state[p].items() if name != "step") == promised * p.numel()


def test_a_group_overrides_format_and_numbers() -> None:
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(4)]
    optimizer = optim.AdamW8bit([
        {"params": params[:1]}, {"params": params[1:2], "optim_bits": 32, "lr": 0.5}, {"params": params[2:3], "state_format": "dynamic4", "block_size": 64},
    ], lr=0.25)  # fmt: skip
    optimizer.add_param_group({"params": params[3:], "min_8bit_size": 10_000})
    before = copies(params)
    run(optimizer, params, 1)
    kinds = [(state["exp_avg"].dtype, tuple(state["exp_avg"].shape)) for state in states(optimizer)]
    assert kinds == [(torch.uint8, (64, 128)), (torch.float32, (64, 128)), (torch.uint8, (4096,)), (torch.float32, (64, 128))]
    moved = [float((p - q).abs().median().detach()) for p, q in zip(params, before, strict=True)]
    assert moved == pytest.approx([0.25, 0.5, 0.25, 0.25], rel=0.02)


def test_parameters_without_gradients_are_left_alone(case: Case) -> None:
    params = parameters()
    before = copies(params)
    optimizer = case.make(params, weight_decay=0.1)
    optimizer.step()
    assert equal(params, before)
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], before[0]) and torch.equal(params[2], before[2]) and not torch.equal(params[1], before[1])
    assert [float(state["step"]) for state in states(optimizer)] == [0, 1, 0]


def test_closure_runs_with_gradients_and_its_loss_is_returned(case: Case) -> None:
    params = parameters()
    optimizer = case.make(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_hooks_run_around_the_step(case: Case) -> None:
    params, seen = parameters(), []
    optimizer = case.make(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, params, 1)
    assert seen == ["before", "after"]


def test_a_scheduler_moves_the_learning_rate_of_floats_and_of_tensors(case: Case) -> None:
    results = []
    for lr in (0.01, torch.tensor(0.01)):
        params = parameters()
        optimizer = case.make(params, lr=lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, cycle_momentum=False)
        for i in range(5):
            run(optimizer, params, 1, seed=i)
            scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_backward_saved_may_not_be_stepped_unnoticed(case: Case) -> None:
    params = parameters()
    optimizer = case.make(params)
    x = torch.randn(3, 64, requires_grad=True)
    y = (x @ params[0]).sum()
    set_grads(params)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("memory", ["channels_last", "transposed", "expanded gradient"])
def test_memory_order_of_parameters_and_gradients_does_not_matter(case: Case, memory: str) -> None:
    values, grad = torch.randn(4, 36, 8, 8), torch.randn(4, 36, 8, 8)
    if memory == "expanded gradient":
        grad = torch.randn(4, 36, 1, 1).expand(4, 36, 8, 8)
    strided = {"channels_last": values.to(memory_format=torch.channels_last), "transposed": values.transpose(0, 1).contiguous().transpose(0, 1),
               "expanded gradient": values.clone()}[memory]  # fmt: skip
    p, q = nn.Parameter(strided), nn.Parameter(values.clone())
    p.grad, q.grad = grad, grad.contiguous()
    stride = p.stride()
    case.make([p], lr=0.01).step()
    case.make([q], lr=0.01).step()
    assert p.stride() == stride
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0)  # the first step does not yet read codes


@pytest.mark.parametrize("shape", [(), (0,), (0, 5000), (1,), (4097,)])
def test_any_number_of_elements(case: Case, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.randn(shape))
    optimizer = case.make([{"params": [p], "min_8bit_size": 0}], lr=0.01)
    before = p.detach().clone()
    run(optimizer, [p], 3)
    assert p.isfinite().all() and (p.numel() == 0 or not torch.equal(p, before))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_never_hidden(case: Case, bad: float) -> None:
    params = parameters()
    optimizer = case.make(params, lr=0.01)
    run(optimizer, params, 2)
    set_grads(params, seed=5)
    params[0].grad[3, 5] = bad
    optimizer.step()
    twin = copies(parameters())
    theirs = case.twin(twin, lr=0.01)
    for seed in (0, 1, 5):
        set_grads(twin, seed=seed)
        if seed == 5:
            twin[0].grad[3, 5] = bad
        theirs.step()
    nan_sign = case.name == "Lion8bit" and bad != bad  # torch.sign(nan) is 0 and would hide it
    assert bool(params[0][3, 5].isnan()) == (bool(twin[0][3, 5].isnan()) or nan_sign)
    run(optimizer, params, 1, seed=6)
    size = optimizer.param_groups[0]["block_size"]
    block = params[0].detach().view(-1, size)[389 // size]  # element (3, 5) is number 389
    if "exp_avg_scale" in optimizer.state[params[0]] or "momentum_buffer_scale" in optimizer.state[params[0]]:
        assert block.isnan().all(), "the whole block reads back nan"
    else:
        assert not params[0][3, 5].isfinite()
    rest = params[0].detach().flatten()[512:]
    assert rest.isfinite().all() and params[1].isfinite().all() and params[2].isfinite().all()


def test_bf16_stochastic_rounding_moves_where_rounding_to_nearest_stands_still() -> None:
    p, q = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    stochastic = optim.AdamW8bit([p], lr=1e-4, weight_decay=0, bf16_stochastic_round=True)
    nearest = optim.AdamW8bit([q], lr=1e-4, weight_decay=0)
    for _ in range(10):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        stochastic.step()
        nearest.step()
    assert bool((q == 1).all())
    assert float(p.detach().float().mean()) == pytest.approx(1 - 10 * 1e-4, abs=2e-4)


def test_stochastic_rounding_repeats_with_the_seed_and_differs_between_parameters() -> None:
    def trained(seed: int) -> list[nn.Parameter]:
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.ones(1 << 13, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = optim.AdamW8bit([{"params": params[:2]}, {"params": params[2:]}], lr=1e-3, bf16_stochastic_round=True)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return params

    first, other = same_for_any_threads(lambda: trained(3)), trained(4)
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


@pytest.mark.parametrize("default", (False, True))
def test_a_group_chooses_its_rounding(default: bool) -> None:
    params = [nn.Parameter(torch.ones(1 << 13, dtype=torch.bfloat16)) for _ in range(2)]
    groups = [{"params": params[:1], "bf16_stochastic_round": not default}, {"params": params[1:]}]
    optimizer = optim.AdamW8bit(groups, lr=1e-4, weight_decay=0, bf16_stochastic_round=default)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [bool((p != 1).any()) for p in params] == [not default, default]


def test_what_a_step_needs_is_found_at_construction() -> None:
    ours = parameters()
    optimizer = optim.AdamW8bit([{"params": ours[:1]}, {"params": ours[1:]}])
    plans = dict(optimizer._plans)
    assert len(plans) == 2
    set_grads(ours)
    optimizer.step()
    assert all(optimizer._plans[index] is plan for index, plan in plans.items())


def test_bitsandbytes_arguments_warn_only_when_they_ask_for_something() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.AdamW8bit(parameters(), 1e-3, (0.9, 0.999), 1e-8, 1e-2, False, min_8bit_size=4096, is_paged=False)
        optim.Lion8bit(parameters(), percentile_clipping=100, block_wise=True)
    with pytest.warns(UserWarning, match="AdamW8bit: is_paged=True has no effect here"):
        optim.AdamW8bit(parameters(), is_paged=True)
    with pytest.warns(UserWarning, match="percentile_clipping=5"):
        optim.SGD8bit(parameters(), percentile_clipping=5)
    with pytest.warns(UserWarning, match="foreach=True has no effect"):
        optim.AdamW8bit(parameters(), foreach=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        optim.AdamW8bit(parameters(), momentun=0.9)


def test_the_row_that_is_forced_runs() -> None:
    for row in lowbit.kernels("optim_step"):
        if row["available"]:
            params = parameters()
            with lowbit.force_kernel(str(row["name"])):
                name = str(row["name"])
                run(optim.AdamW8bit([{"params": params, "state_format": name.split("_")[2], "min_8bit_size": 0}]), params, 1)
            assert _C.last_kernel("optim_step") == name
