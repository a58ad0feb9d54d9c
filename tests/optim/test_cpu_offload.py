# SPDX-License-Identifier: Apache-2.0
"""`CPUOffloadOptimizer` over parameters that lie on the CPU: it is the base optimizer itself, bit for bit, without
copies. Parameters on a device: tests/devices/simulated/check_offload.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Case, copies, equal, parameters, run

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_on_the_cpu_it_steps_the_parameters_where_they_are(case: Case, offload_gradients: bool) -> None:
    params = parameters()
    reference = copies(params)
    offloaded = CPUOffloadOptimizer(params, case.make, lr=0.01, offload_gradients=offload_gradients)
    plain = case.make(reference, lr=0.01)
    run(offloaded, params, 3)
    run(plain, reference, 3)
    assert equal(params, reference)
    assert all(a is b for a, b in zip(params, offloaded.base_optimizer.param_groups[0]["params"], strict=True))
    assert all(p.grad is not None for p in params)  # nothing is to be offloaded
    assert all(offloaded.state[p] is offloaded.base_optimizer.state[p] for p in params)


def test_groups_schedulers_closures_and_named_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 19))
    groups = [
        {"params": model[0].named_parameters(), "lr": 0.5, "optim_bits": 4},
        {"params": model[1].named_parameters()},
    ]
    optimizer = CPUOffloadOptimizer(groups, optim.AdamW8bit, lr=0.25)
    assert [group["state_format"] for group in optimizer.param_groups] == ["dynamic4", "dynamic8"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    x = torch.randn(3, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(2)]
    scheduler.step()
    optimizer.step(closure)
    assert losses[0].requires_grad and len(losses) == 2
    saved = optimizer.state_dict()["param_groups"]
    assert (
        [group["lr"] for group in saved]
        == [0.25, 0.125]
        == [group["lr"] for group in optimizer.base_optimizer.param_groups]
    )
    assert saved[1]["param_names"] == ["weight", "bias"] and saved[0]["initial_lr"] == 0.5


def test_frozen_parameters_of_any_kind_are_ignored() -> None:
    params: list[Any] = [
        nn.Parameter(torch.randn(64, 128)),
        nn.Parameter(torch.zeros(5000, dtype=torch.uint8), requires_grad=False),
        nn.Parameter(torch.randn(5000, device="meta"), requires_grad=False),
    ]
    optimizer = CPUOffloadOptimizer(params, optim.AdamW8bit)
    run(optimizer, params[:1], 2)
    assert list(optimizer.state) == params[:1]


def test_distributed_checkpoint_finds_its_states_and_takes_no_step() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = nn.Sequential(nn.Linear(64, 128))
    optimizer = CPUOffloadOptimizer(model.parameters(), optim.AdamW8bit, lr=0.01)
    run(optimizer, [*model.parameters()], 2)
    saved = get_optimizer_state_dict(model, optimizer)
    assert [float(state["step"]) for state in saved["state"].values()] == [2.0, 2.0]
    other = nn.Sequential(nn.Linear(64, 128))
    other.load_state_dict(model.state_dict())
    resumed = CPUOffloadOptimizer(other.parameters(), optim.AdamW8bit, lr=0.5)
    set_optimizer_state_dict(other, resumed, saved)
    for each, m in ((optimizer, model), (resumed, other)):
        run(each, [*m.parameters()], 1, seed=7)
    assert equal([*model.parameters()], [*other.parameters()])


def test_a_state_dict_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    params = parameters()
    optimizer = CPUOffloadOptimizer(params, optim.AdamW8bit, lr=0.01)
    run(optimizer, params, 2)
    lion = optim.Lion8bit(copies(params))
    run(lion, lion.param_groups[0]["params"], 3)
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with pytest.raises(ValueError, match=r"AdamW8bit.load_state_dict: param"):
        optimizer.load_state_dict(lion.state_dict())
    assert all(torch.equal(state["exp_avg"], old) for state, old in zip(optimizer.state.values(), before, strict=True))
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0] * 3
