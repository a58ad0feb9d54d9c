# SPDX-License-Identifier: Apache-2.0
"""Layers that change in place while other threads call them: a call meets the float layer or the packed one."""

from __future__ import annotations

import copy

import pytest
import torch
from each_step import CALLING, CHANGING, at_each_step
from torch import Tensor, nn

import lowbit


class Experts(nn.Module):
    """The experts 0 and 1 of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 48) / 7)
        self.down_proj = nn.Parameter(torch.randn(3, 48, 16) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("tk,tjnk->tjn", hidden_states, self.gate_up_proj[top_k_index]).chunk(2, dim=-1)
        y = torch.einsum("tjk,tjnk->tjn", self.act_fn(gate) * up, self.down_proj[top_k_index])
        return (y * top_k_weights[..., None]).sum(1)


def layer(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "experts":
        return Experts(), torch.randn(3, 48)
    if kind == "embedding":
        return nn.Embedding(40, 32), torch.arange(7)
    if kind == "conv1d":
        return pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 48), torch.randn(3, 48)
    return nn.Linear(48, 32), torch.randn(3, 48)


def pack(module: nn.Module, kind: str) -> None:
    if kind == "blocks":
        lowbit.sparsify_(module, lowbit.block_sparse_weight(16))
    else:
        lowbit.quantize_(module, lowbit.int8_weight_only(), lambda _, name: not name)


def call(module: nn.Module, x: Tensor) -> Tensor:
    if hasattr(module, "act_fn"):
        return module(x, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5))
    return module(x)


EVERY = {"experts": 29}
"""Of a kind whose change has many steps one of so many."""
KINDS = ["linear", "conv1d", "embedding", "blocks", "experts"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_that_is_called_at_each_step_of_a_change(kind: str) -> None:
    module, x = layer(kind)
    wanted = call(module, x)
    packing = at_each_step(CHANGING, lambda module: pack(module, kind), lambda module: call(module, x), lambda: copy.deepcopy(module), EVERY.get(kind, 1))
    results = [y for _, y in packing]
    pack(module, kind)
    results += [y for _, y in at_each_step(CHANGING, lowbit.dequantize_, lambda module: call(module, x), lambda: copy.deepcopy(module), EVERY.get(kind, 1))]
    assert len(results) > 100 // EVERY.get(kind, 1)
    assert all(torch.allclose(y, wanted, atol=0.05) for y in results)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_that_becomes_float_at_each_step_of_a_call(kind: str) -> None:
    module, x = layer(kind)
    wanted = call(module, x)
    pack(module, kind)
    results = [y for y, _ in at_each_step(CALLING, lambda module: call(module, x), lowbit.dequantize_, lambda: copy.deepcopy(module))]
    assert len(results) > 10
    assert all(torch.allclose(y, wanted, atol=0.05) for y in results)
