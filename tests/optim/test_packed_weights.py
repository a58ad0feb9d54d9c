# SPDX-License-Identifier: Apache-2.0
"""Optimizers and packed weights: what trains nothing says so."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import lowbit
from lowbit.optim import AdamW, AdamW8bit, CPUOffloadOptimizer, Lion8bit
from lowbit.training import QATConfig

X = torch.randn(3, 64)


def packed(bias: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.ReLU(), nn.Linear(32, 9, bias=bias))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("cls", [AdamW, AdamW8bit, Lion8bit, CPUOffloadOptimizer])
def test_packed_weights_alone_are_refused_with_the_ways_to_train(cls: type) -> None:
    for params in (list(packed(bias=False).parameters()), [{"params": [layer.weight]} for layer in packed()[::2]]):
        with pytest.raises(ValueError, match=r"a parameter must require a gradient, got 2 that do not, 2 of them codes .*peft.*QATConfig.*dequantize_"):
            cls(params, lr=1e-3)


def test_packed_weights_beside_others_and_frozen_floats_alone_are_taken() -> None:
    model = packed()
    before = model[0].bias.detach().clone()
    step(model, AdamW8bit(model.parameters(), lr=0.1))
    assert not torch.equal(model[0].bias, before)
    AdamW8bit(nn.Linear(4, 4).requires_grad_(False).parameters())


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_optimizer_that_was_made_before_quantize_says_so_at_each_step(bias: bool, stepped: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.LayerNorm(32))
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    if stepped:
        step(model, optimizer)
        optimizer.zero_grad()
    lowbit.quantize_(model, lowbit.int4_weight_only(32))
    kept = model[1].weight.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"AdamW8bit: parameters must be those of the model, got 1 of {3 + bias} whose layers were packed since, .* of shape \[32, 64\]"):
            step(model, optimizer)
        assert torch.equal(model[1].weight, kept)
    step(model, AdamW8bit((param for param in model.parameters() if param.requires_grad), lr=1e-3))


def test_a_frozen_base_may_be_packed_below_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.LayerNorm(32))
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    step(model, optimizer)


def test_a_table_that_stays_float_beside_its_packed_head_trains_on() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    before = model["embed"].weight.detach().clone()
    model["head"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    assert not torch.equal(model["embed"].weight, before)


def test_quantization_aware_training_keeps_its_optimizer_until_it_is_converted() -> None:
    model, config = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)), lowbit.int4_weight_only(32)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    lowbit.quantize_(model, QATConfig(config))
    step(model, optimizer)
    optimizer.zero_grad()
    lowbit.quantize_(model, QATConfig(config, step="convert"))
    with pytest.raises(ValueError, match="whose layers were packed since"):
        step(model, optimizer)


def test_the_note_of_a_replaced_parameter_keeps_nothing_alive() -> None:
    from lowbit.ops import packed_weights

    gc.collect()
    count = len(packed_weights.REPLACED)
    model = packed()
    gc.collect()
    assert len(packed_weights.REPLACED) == count and model[0].weight.dtype is torch.uint8
