# SPDX-License-Identifier: Apache-2.0
"""QATConfig: what is trained is what is converted, bit for bit, for every format; learned scales; the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit import testing
from lowbit.formats import FormatConfig
from lowbit.ops.fake_quantize import fake_quantize_activations
from lowbit.quant.packing import pack_weight
from lowbit.training import FakeQuantizedLinear, QATConfig

Make = Callable[..., nn.Module]


def layers_of(model: nn.Module, kind: type[nn.Module] = FakeQuantizedLinear) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def convert(model: nn.Module, config: FormatConfig) -> Any:
    return lowbit.quantize_(model, QATConfig(config, step="convert"))


@pytest.mark.parametrize("learned_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_converted_weight_is_that_of_the_last_forward(
    prepared: Make, train: Callable[..., Any], config: FormatConfig, dtype: torch.dtype, learned_scales: bool
) -> None:
    model = prepared(config, dtype, learned_scales=learned_scales)
    first = [layer.weight.detach().clone() for layer in layers_of(model)]
    train(model)
    last = [layer.fake_quantized_weight().detach() for layer in layers_of(model)]
    assert all(not torch.equal(layer.weight, weight) for layer, weight in zip(layers_of(model), first, strict=True))
    report = convert(model, config)
    converted = layers_of(model, lowbit.QuantLinear)
    assert [row.format for row in report.rows] == [layer.spec.name for layer in converted]
    assert len(converted) == 3 and not layers_of(model)
    for layer, weight in zip(converted, last, strict=True):
        assert weight.dtype == dtype and torch.equal(layer.dequantize(dtype), weight)
        assert layer.spec.name == config.spec(dtype).name


def test_the_codes_are_those_of_quantize_with_the_scales_of_ranges(prepared: Make, config: FormatConfig) -> None:
    model = prepared(config)
    floats = [layer.weight.detach().clone() for layer in layers_of(model)]
    convert(model, config)
    for layer, weight in zip(layers_of(model, lowbit.QuantLinear), floats, strict=True):
        packed = pack_weight(weight, replace(layer.spec, scale="absmax"))[0]
        alone = lowbit.QuantLinear.from_packed(packed, *weight.shape, layer.spec)
        for part, wanted in zip(layer.unpack(), alone.unpack(), strict=True):
            assert torch.equal(part, wanted)


def test_the_prepared_layer_computes_what_the_converted_one_does(prepared: Make, config: FormatConfig) -> None:
    """The same codes of activations and weights, multiplied exactly: only the order of float32 sums differs."""
    model = prepared(config)
    for layer in layers_of(model):
        x = torch.randn(9, layer.in_features) + 0.2
        y, weight = layer(x).detach(), layer.fake_quantized_weight().detach().double()
        rounded = x if not layer.x_format else fake_quantize_activations(x, layer.x_format, layer.spec.group_size)
        quant = copy.deepcopy(layer)
        convert(quant, config)
        bias = 0 if layer.bias is None else layer.bias.detach().double()
        wanted = rounded.double() @ weight.T + bias
        # A zero point of activations or weights is taken off the sum of codes that are up to 255 of its steps away.
        zero = layer.spec.asymmetric or layer.spec.x_format.endswith("asymmetric")
        size = rounded.double().abs() @ weight.abs().T + (bias if isinstance(bias, int) else bias.abs())
        if zero:
            size = size + 256 * rounded.abs().double().amax(1, True) * weight.abs().amax() * 2
        allowed = (layer.in_features + 8) * testing.ROUNDOFF["float32"] * size
        testing.assert_within(y, wanted, allowed, what="prepared")
        testing.assert_within(quant(x).detach(), wanted, allowed, what="converted")


def test_gradients_are_straight_through(prepared: Make) -> None:
    """Those of a float layer with the rounded weight and x, but for weights whose code was clipped."""
    config = lowbit.int8_dynamic_activation_int4_weight(32)
    layer = layers_of(prepared(config))[0]
    x = torch.randn(6, 100, requires_grad=True)
    layer(x).square().sum().backward()
    weight = layer.fake_quantized_weight().detach().requires_grad_()
    rounded = fake_quantize_activations(x.detach(), layer.x_format, 32).requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    functional.linear(rounded, weight, bias).square().sum().backward()
    scale = layer.quantize()[1].repeat_interleave(32, 1)[:, :100]
    clipped = torch.round(layer.weight.detach() / scale + 8) > 15
    assert 0 < clipped.sum() < layer.weight.numel() / 20
    assert torch.equal(layer.weight.grad, torch.where(clipped, 0, weight.grad))
    assert torch.equal(x.grad, rounded.grad) and torch.equal(layer.bias.grad, bias.grad)


def test_learned_scales_begin_as_the_configuration_chooses_them_and_are_trained(
    prepared: Make, train: Callable[..., Any], config: FormatConfig
) -> None:
    model = prepared(config, learned_scales=True)
    floats = [layer.weight.detach().clone() for layer in layers_of(model)]
    first = [layer.weight_scale.detach().clone() for layer in layers_of(model)]
    for layer, weight, scale in zip(layers_of(model), floats, first, strict=True):
        spec = config.spec(torch.float32)
        packed = lowbit.QuantLinear.from_packed(pack_weight(weight, spec)[0], *weight.shape, spec)
        assert torch.equal(scale, packed.unpack()[1])
        if spec.takes_absmax:
            assert torch.equal(layer.fake_quantized_weight(), packed.dequantize())
    train(model)
    trained = [layer.weight_scale.detach() for layer in layers_of(model)]
    assert all(not torch.equal(*pair) for pair in zip(first, trained, strict=True))


def test_training_takes_the_loss_below_that_of_rounding(
    prepared: Make, model: nn.Module, train: Callable[..., Any]
) -> None:
    """Of a model that was trained in float before; int2 by rounding alone is far off."""
    config = lowbit.intx_weight_only(torch.int2, 32)
    train(model, 150)
    rounded = copy.deepcopy(model)
    lowbit.quantize_(rounded, config)
    with torch.no_grad():
        before = train_loss(rounded)
    losses = {}
    for learned_scales in (False, True):
        trained = prepared(config, learned_scales=learned_scales)
        train(trained, 150)
        convert(trained, config)
        with torch.no_grad():
            losses[learned_scales] = train_loss(trained)
    assert losses[False] < 0.9 * before and losses[True] < 0.9 * before  # 0.7 to 0.81, by the sums of the machine


def train_loss(model: nn.Module) -> Tensor:
    x = torch.randn(256, 100, generator=torch.Generator().manual_seed(99))
    return (model(x) - x[:, :9].sin()).square().mean()
