# SPDX-License-Identifier: Apache-2.0
"""Ternary weights: what is rounded, the straight-through gradient, and that the trained model is the converted one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit import _C, testing
from lowbit.ops.fake_quantize import fake_quantize_activations
from lowbit.training import BitNetLinear, BitNetTrainingConfig, QATConfig

PREPARE, CONVERT = BitNetTrainingConfig(), BitNetTrainingConfig(step="convert")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def trained(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    lowbit.quantize_(made, PREPARE)
    return made


@DTYPES
def test_weights_are_the_nearest_of_three_and_activations_int8(trained: nn.Module, dtype: torch.dtype) -> None:
    layer = trained.to(dtype)[0]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    scale = weight.double().abs().mean()
    rounded = layer.fake_quantized_weight().detach()
    assert rounded.dtype is dtype and len(rounded.unique()) == 3
    ternary = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.double) * scale
    nearest = ternary[(weight.double().unsqueeze(-1) - ternary).abs().argmin(-1)]
    torch.testing.assert_close(rounded.double(), nearest, rtol=4 * testing.ROUNDOFF[str(dtype)[6:]], atol=0)
    x = torch.randn(9, 100).to(dtype)
    wanted = functional.linear(fake_quantize_activations(x, _C.X_FORMATS["int8_row"], 0), rounded, bias)
    assert torch.equal(layer(x).detach(), wanted)


@DTYPES
def test_gradients_are_straight_through(trained: nn.Module, dtype: torch.dtype) -> None:
    layer = trained.to(dtype)[0]
    x = torch.randn(6, 100).to(dtype).requires_grad_()
    layer(x).square().sum().backward()
    rounded = fake_quantize_activations(x.detach(), _C.X_FORMATS["int8_row"], 0).requires_grad_()
    weight = layer.fake_quantized_weight().detach().requires_grad_()
    functional.linear(rounded, weight, layer.bias.detach()).square().sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad) and torch.equal(x.grad, rounded.grad)


@DTYPES
def test_the_converted_model_has_the_weights_of_the_last_forward(
    trained: nn.Module, train: Callable[..., Any], dtype: torch.dtype
) -> None:
    train(trained.to(dtype))
    layers = [trained[i] for i in (0, 2, 4)]
    last, x = [layer.fake_quantized_weight().detach() for layer in layers], torch.randn(9, 33).to(dtype)
    y = layers[1](x).detach().double()
    report = lowbit.quantize_(trained, CONVERT)
    assert [row.format for row in report.rows] == ["int2 per-channel int8-activations per row"] * 3
    for layer, weight in zip(layers, last, strict=True):
        assert type(layer) is lowbit.QuantLinear and torch.equal(layer.dequantize(dtype), weight)
    size = x.double().abs() @ last[1].double().abs().T
    testing.assert_within(layers[1](x), y, 40 * testing.ROUNDOFF[str(dtype)[6:]] * size, what="converted")


def test_training_takes_the_loss_below_that_of_rounding(model: nn.Module, train: Callable[..., list[Tensor]]) -> None:
    trained = copy.deepcopy(model)
    lowbit.quantize_(trained, PREPARE)
    losses = train(trained, 300)
    train(model, 300)
    lowbit.quantize_(model, PREPARE)  # trained in float, and rounded after it
    rounded = torch.stack(train(model, 20, torch.optim.SGD(model.parameters(), lr=0.0), first=300)).mean()
    last = torch.stack(losses[-20:]).mean()
    assert last < 0.8 * losses[0] and last < 0.8 * rounded


def test_zeros_and_what_is_not_finite(trained: nn.Module) -> None:
    layer = trained[0]
    with torch.no_grad():
        layer.weight.zero_()
    assert not layer.fake_quantized_weight().any()
    with torch.no_grad():
        layer.weight[0, 0] = torch.inf
    assert layer(torch.randn(3, 100)).isnan().all()
    with pytest.raises(ValueError, match="weight of 0 must be finite, got inf or nan"):
        lowbit.quantize_(trained, CONVERT)


def test_compiled_graphs_and_autocast(trained: nn.Module) -> None:
    x = torch.randn(9, 100)
    compiled = torch.compile(trained, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), trained(x))
    with torch.autocast("cpu"):
        assert trained(x).dtype is torch.bfloat16


def test_what_is_refused_and_the_way_back(model: nn.Module, trained: nn.Module, subtests: pytest.Subtests) -> None:
    with pytest.raises(ValueError, match="BitNetTrainingConfig: step must be 'prepare' or 'convert', got step=1"):
        BitNetTrainingConfig(step=1)
    with pytest.raises(ValueError, match=r"head must be left out with BitNetTrainingConfig.*, got int8_weight_only"):
        lowbit.quantize_(model, PREPARE, head=lowbit.int8_weight_only())
    with pytest.raises(ValueError, match=r"needs layers prepared for BitNetTrainingConfig\(\), got layers prepared for none"):
        lowbit.quantize_(model, CONVERT)
    for again in (PREPARE, lowbit.int8_weight_only()):
        with subtests.test(str(again)), pytest.raises(ValueError, match="0 is being trained as int2.*or end it with .*BitNetTrainingConfig.step="):
            lowbit.quantize_(trained, again)
    packed = copy.deepcopy(trained)
    lowbit.quantize_(packed, CONVERT)
    with pytest.raises(ValueError, match="weight must be float, as the layer is being trained.*loaded after BitNet"):
        trained.load_state_dict(packed.state_dict())
    assert type(trained[0]) is BitNetLinear
    lowbit.quantize_(trained, QATConfig(step="convert"))
    assert type(trained[0]) is nn.Linear and trained[0].__dict__.keys() == model[0].__dict__.keys()
