# SPDX-License-Identifier: Apache-2.0
"""lowbit.peers.torchao has torchao's names; torchao's own quantize_ takes our configurations."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats import FORMATS
from lowbit.peers import torchao as alias


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33))


def test_a_program_changes_its_imports_alone():
    from lowbit.peers.torchao import quantize_
    from lowbit.peers.torchao.optim import AdamW8bit
    from lowbit.peers.torchao.quantization import Int8WeightOnlyConfig, PerGroup

    net = model()
    quantize_(net, Int8WeightOnlyConfig(granularity=PerGroup(32)), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    assert net[0].spec.name == "int8 g32"
    optimizer = AdamW8bit([nn.Parameter(torch.ones(4096))], lr=1e-3)
    assert isinstance(optimizer, lowbit.optim.AdamW8bit)


@pytest.mark.parametrize("room", ["quantization", "optim"])
def test_every_name_of_torchao_is_there_or_says_what_to_use(room):
    theirs = pytest.importorskip(f"torchao.{room}")
    ours = importlib.import_module(f"lowbit.peers.torchao.{room}")
    for name in theirs.__all__:
        if not hasattr(ours, name):
            with pytest.raises(AttributeError, match=f"'lowbit.peers.torchao.{room}' has no attribute '{name}'; use "):
                getattr(ours, name)
    assert sum(hasattr(ours, name) for name in theirs.__all__) >= 6


def test_one_scale_for_a_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match="granularity must be PerRow.*PerTensor.*less precise and no faster"):
        alias.quantization.Int8WeightOnlyConfig(granularity=alias.quantization.PerTensor())


@pytest.mark.parametrize("cls", FORMATS)
def test_quantize_of_torchao_makes_quantlinear(cls):
    torchao = pytest.importorskip("torchao")
    theirs, ours = model(), model()
    torchao.quantize_(theirs, cls())
    lowbit.quantize_(ours, cls())
    assert [type(layer) for layer in theirs] == [type(layer) for layer in ours]
    x = torch.randn(5, 64)
    assert torch.equal(theirs(x), ours(x))
    only = model()
    torchao.quantize_(only, cls(), filter_fn=lambda module, name: name == "2")
    assert type(only[0]) is nn.Linear and type(only[2]) is lowbit.QuantLinear


@pytest.mark.parametrize("order", ["import lowbit\nimport torchao", "import torchao\nimport lowbit", "import torch\nimport torchao"])
def test_the_order_of_imports_does_not_matter(python: Callable[..., str], order: str):
    pytest.importorskip("torchao")
    code = f"""
{order}
import torch, lowbit
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
torchao.quantize_(model, lowbit.int4_weight_only(32))
print(type(model[0]).__name__)
"""
    assert python(code).split()[-1] == "QuantLinear"


def test_without_torchao_the_names_are_there(python: Callable[..., str]):
    code = "import sys\nsys.modules['torchao'] = None\nfrom lowbit.peers.torchao import quantize_\nprint(quantize_.__module__)"
    assert python(code).strip() == "lowbit.quant.quantize"
