# SPDX-License-Identifier: Apache-2.0
"""A learning rate that a scheduler changes, in a compiled step: one graph for a tensor, two for a float, and the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from twins import Case, copies, equal, parameters, set_grads

import lowbit
from lowbit.ops.optim import SCHEMA

STEPS = 5


@pytest.mark.parametrize("lr", [lambda: 0.01, lambda: torch.tensor(0.01)], ids=["float", "tensor"])
def test_a_scheduled_lr_makes_no_graph_of_its_own(case: Case, lr: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    params = parameters()
    reference = copies(params)
    optimizers = [case.make(each, lr=lr()) for each in (params, reference)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, STEPS) for each in optimizers]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda: optimizers[0].step(), backend=counter)
    values = set()
    for seed in range(STEPS):
        set_grads(params, reference, seed=seed)
        values.add(float(optimizers[0].param_groups[0]["lr"]))
        compiled()
        optimizers[1].step()
        for scheduler in schedulers:
            scheduler.step()
        assert equal(params, reference)
    assert len(values) == STEPS
    # Of a float torch first takes the value, and makes it an input of the graph when it meets another.
    assert counter.frame_count == (2 if isinstance(lr(), float) else 1)


def test_optimizers_of_other_options_are_compiled_in_one_process() -> None:
    """Of the numbers in options that differ from those of the first, torch makes inputs of the graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options = {"AdamW8bit": {}, "AdamW4bit": {}, "Lion8bit": {"block_size": 1024}, "SGD8bit": {"momentum": 0.9}, "Muon8bit": {}}
    for name in (*options, "AdamW8bit"):
        params = [torch.nn.Parameter(torch.randn(64, 300)), torch.nn.Parameter(torch.randn(300, 20))]
        reference = copies(params)
        optimizer, plain = (getattr(lowbit.optim, name)(each, lr=0.01, **options[name]) for each in (params, reference))
        compiled = torch.compile(optimizer.step, backend=counter)
        graphs = []
        for seed in range(3):
            set_grads(params, reference, seed=seed)
            compiled()
            plain.step()
            graphs.append(counter.frame_count)
        assert equal(params, reference), name
        assert graphs[0] == graphs[-1], f"{name} is compiled again in a later step: {graphs}"


def test_one_graph_holds_every_group(case: Case) -> None:
    torch._dynamo.reset()
    params = parameters()
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
    optimizer = case.make(groups, lr=0.01)
    set_grads(params, seed=0)
    explained = torch._dynamo.explain(lambda: optimizer.step())()
    assert explained.graph_count == 1 and explained.graph_break_count == 0
    calls = [node for node in explained.graphs[0].graph.nodes if "optim_step_" in str(node.target)]
    assert len(calls) >= 2  # each group has a state format or two


def test_a_compiled_step_refuses_an_lr_that_is_no_number(case: Case) -> None:
    torch._dynamo.reset()
    params = parameters()
    optimizer = case.make(params, lr=0.01)
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    set_grads(params, seed=0)
    with pytest.raises(Exception, match=r"lr must be a number or a tensor of one number, got a tensor \[2\]"):
        torch.compile(lambda: optimizer.step(), backend="eager")()


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU", "PrivateUse1"])
def test_the_op_of_a_compiled_step_is_registered_for_every_device(key: str) -> None:
    name = f"lowbit::{SCHEMA.partition('(')[0]}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
