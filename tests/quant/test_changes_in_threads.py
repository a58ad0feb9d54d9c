# SPDX-License-Identifier: Apache-2.0
"""Layers that change in place while other threads call them: a call meets the float layer or the packed one."""

from __future__ import annotations

import copy

import pytest
import torch
from each_step import CALLING, CHANGING, at_each_step
from torch import Tensor, nn

import lowbit


def layer(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "embedding":
        return nn.Embedding(40, 32), torch.arange(7)
    if kind == "conv1d":
        return pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 48), torch.randn(3, 48)
    return nn.Linear(48, 32), torch.randn(3, 48)


def pack(module: nn.Module, kind: str) -> None:
    if kind == "blocks":
        lowbit.sparsify_(module, lowbit.block_sparse_weight(16))
    else:
        lowbit.quantize_(module, lowbit.int8_weight_only(), lambda *_: True)


KINDS = ["linear", "conv1d", "embedding", "blocks"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_that_is_called_at_each_step_of_a_change(kind: str) -> None:
    module, x = layer(kind)
    wanted = module(x)
    packing = at_each_step(CHANGING, lambda module: pack(module, kind), lambda module: module(x), lambda: copy.deepcopy(module))
    results = [y for _, y in packing]
    pack(module, kind)
    results += [y for _, y in at_each_step(CHANGING, lowbit.dequantize_, lambda module: module(x), lambda: copy.deepcopy(module))]
    assert len(results) > 100
    assert all(torch.allclose(y, wanted, atol=0.05) for y in results)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_that_becomes_float_at_each_step_of_a_call(kind: str) -> None:
    module, x = layer(kind)
    wanted = module(x)
    pack(module, kind)
    results = [y for y, _ in at_each_step(CALLING, lambda module: module(x), lowbit.dequantize_, lambda: copy.deepcopy(module))]
    assert len(results) > 10
    assert all(torch.allclose(y, wanted, atol=0.05) for y in results)
