# SPDX-License-Identifier: Apache-2.0
"""Chained optimizers step as they do alone; the parameters of a model that Muon gets."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from lowbit import optim


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.conv, self.head = nn.Linear(8, 8), nn.Conv1d(1, 1, 3, padding=1), nn.Linear(8, 11, bias=False)
        self.experts, self.frozen = nn.Parameter(torch.randn(2, 8, 8) / 8), nn.Linear(8, 8).requires_grad_(False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.norm(self.table(ids)))
        return self.head(self.frozen(self.conv(x[:, None])[:, 0]) @ self.experts.sum(0))


def made(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = optim.split_for_muon(model)
    return [
        optim.Muon8bit(matrices, lr=0.01, min_8bit_size=0, ns_dtype=torch.float32),
        torch.optim.SGD([{"params": others[:2], "lr": 0.2}, {"params": others[2:]}], lr=0.1, momentum=0.9),
    ]


def run(model: nn.Module, optimizers: list[Any], schedulers: list[Any], steps: int) -> None:
    for step in range(steps):
        model(torch.arange(8) + step % 3).square().mean().backward()
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_muon_gets_the_matrices_inside_of_a_model() -> None:
    model = Model()
    matrices, others = optim.split_for_muon(model)
    assert {id(p) for p in matrices} == {id(model.inner.weight), id(model.experts)}
    wanted = (model.table, model.norm, model.conv, model.head)
    assert {id(p) for p in others} == {id(p) for each in wanted for p in each.parameters()} | {id(model.inner.bias)}


def test_a_chain_steps_as_its_optimizers_do_alone() -> None:
    one, two = Model(), Model()
    chain, alone = optim.ChainedOptimizer(made(one)), made(two)
    run(one, [chain], [halving(chain)], 4)
    run(two, alone, [halving(each) for each in alone], 4)
    assert all(torch.equal(*both) for both in zip(one.parameters(), two.parameters(), strict=True))
    assert [group["lr"] for group in chain.param_groups] == [0.01 / 16, 0.2 / 16, 0.1 / 16]


def test_a_closure_is_called_once() -> None:
    model, calls = Model(), []
    chain = optim.ChainedOptimizer(made(model))

    def closure() -> torch.Tensor:
        chain.zero_grad()
        loss = model(torch.arange(8)).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    assert chain.step(closure) is calls[0] and len(calls) == 1


@pytest.mark.parametrize("copied", ["saved", "deepcopy"])
def test_a_copy_continues_bit_for_bit(copied: str) -> None:
    model = Model()
    chain = optim.ChainedOptimizer(made(model))
    run(model, [chain], [], 2)
    if copied == "saved":
        other, file = copy.deepcopy(model), io.BytesIO()
        torch.save(chain.state_dict(), file)
        file.seek(0)
        again = optim.ChainedOptimizer(made(other))
        again.load_state_dict(torch.load(file, weights_only=True))
    else:
        other, again = copy.deepcopy((model, chain))
    for optimizer in (chain, again):
        for group in optimizer.param_groups:  # the groups are those that the chained optimizers read
            group["lr"] *= 0.5
    run(model, [chain], [], 2)
    run(other, [again], [], 2)
    assert all(torch.equal(*both) for both in zip(model.parameters(), other.parameters(), strict=True))


def test_bad_input_is_refused_by_name() -> None:
    model = Model()
    optimizers = made(model)
    with pytest.raises(TypeError, match="optimizers must be optimizers, got Model"):
        optim.ChainedOptimizer([model])
    with pytest.raises(ValueError, match="must have one optimizer at least"):
        optim.ChainedOptimizer([])
    with pytest.raises(ValueError, match="must not share parameters, got 8 twice"):
        optim.ChainedOptimizer([*optimizers, torch.optim.SGD([p for p in model.parameters() if p.requires_grad][:8])])
    chain = optim.ChainedOptimizer(optimizers)
    with pytest.raises(RuntimeError, match="add the group to one of the optimizers"):
        chain.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="must have 2 optimizers, got 1 of them"):
        chain.load_state_dict({"optimizers": chain.state_dict()["optimizers"][:1]})
    with pytest.raises(ValueError, match="must have 2 optimizers, got state, param_groups"):
        chain.load_state_dict(optimizers[1].state_dict())
