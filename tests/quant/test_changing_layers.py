# SPDX-License-Identifier: Apache-2.0
"""Integrations are told of a model by every function that packs layers of it or makes them float again, at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import changing_layers, quantize
from lowbit.training import BitNetTrainingConfig, Int8WeightOnlyQuantizedTrainingConfig, QATConfig

INT8 = lowbit.int8_weight_only()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model if isinstance(layer, nn.Linear)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The kinds of the layers at each time that an observer was told."""
    seen: list[list[str]] = []
    monkeypatch.setattr(changing_layers, "OBSERVERS", [lambda model: seen.append(kinds(model))])
    yield seen


def ended(training: Callable[..., object]) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> None:
        lowbit.quantize_(model, training())
        lowbit.quantize_(model, training(step="convert"))

    return change


def loaded(model: nn.Module) -> None:
    packed = net()
    lowbit.quantize_(packed, INT8)
    lowbit.load(model, packed.state_dict())


CHANGES = {
    "quantize_": (lambda model: lowbit.quantize_(model, INT8), "QuantLinear"),
    "sparsify_": (lambda model: lowbit.sparsify_(model, lowbit.semi_sparse_weight()), "QuantLinear"),
    "blocks": (lambda model: lowbit.sparsify_(model, lowbit.block_sparse_weight(16)), "BlockSparseLinear"),
    "load": (loaded, "QuantLinear"),
    "QAT": (ended(lambda **step: QATConfig(INT8, **step)), "QuantLinear"),
    "ternary": (ended(BitNetTrainingConfig), "QuantLinear"),
    "int8 training": (ended(Int8WeightOnlyQuantizedTrainingConfig), "QuantLinear"),
    "dequantize_": (lambda model: (lowbit.quantize_(model, INT8), lowbit.dequantize_(model)), "Linear"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_last_word_is_of_the_layers_that_are_there(name: str, told: list[list[str]]) -> None:
    change, kind = CHANGES[name]
    model = net()
    change(model)
    assert told[-1] == kinds(model) == [kind, kind]


def test_a_call_that_ends_early_tells_what_it_has_changed(told: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    pack, calls = quantize.pack_weight, []

    def pack_one(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return pack(*args)

    monkeypatch.setattr(quantize, "pack_weight", pack_one)
    with pytest.raises(KeyboardInterrupt):
        lowbit.quantize_(net(), INT8)
    assert told == [["QuantLinear", "Linear"]]


def test_a_refused_call_tells_nothing(told: list[list[str]]) -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        lowbit.quantize_(model, INT8)
    assert not told
