# SPDX-License-Identifier: Apache-2.0
"""QuantLinear: one packed weight, plain tensors, and every way to copy, move, save and read it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats import LinearSpec
from lowbit.quant import QuantLinear
from lowbit.reference.quantize import LEVELS


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(100, 33)


@pytest.fixture
def layer(linear, config) -> QuantLinear:
    return QuantLinear.from_linear(linear, config.spec(torch.float32))


def test_from_linear_leaves_the_source_as_it_is_and_shares_the_bias(linear, layer):
    assert type(linear) is nn.Linear and linear.weight.shape == (33, 100)
    assert layer.bias is linear.bias


def test_from_linear_refuses_nan_and_names_the_layer(linear):
    linear.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="from_linear: weight of fc must be finite"):
        QuantLinear.from_linear(linear, LinearSpec("int8"), name="fc")


def test_it_is_a_linear_with_the_same_face(layer):
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (100, 33)
    assert repr(layer) == f"QuantLinear(in_features=100, out_features=33, bias=True, {layer.spec.name})"


def test_forward_is_the_product_with_the_dequantized_weight(layer, x):
    wanted = nn.functional.linear(x, layer.dequantize(), layer.bias)
    tolerance = {"float": 1e-5, "float8_row": 0.05}.get(layer.spec.x_format, 0.02)
    assert (layer(x) - wanted).norm() <= tolerance * wanted.norm()


def test_the_gradient_reaches_input_and_bias_and_never_the_weight(layer, x):
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all() and layer.bias.grad.shape == (33,)
    assert layer.weight.grad is None
    grad = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.testing.assert_close(grad, layer.dequantize().sum(0).expand_as(grad), rtol=1e-4, atol=1e-5)


def test_codes_scale_and_zero_give_the_weight_and_pack_takes_them_back(layer):
    if layer.spec.is_float:
        with pytest.raises(ValueError, match="unpack: the format must have codes, got"):
            layer.unpack()
        return
    codes, scale, zero = layer.unpack()
    groups = layer.spec.groups(100)
    assert codes.shape == (33, 100) and scale.shape == zero.shape == (33, groups)
    spread = [t.repeat_interleave(layer.spec.group_size or 100, dim=1)[:, :100] for t in (scale, zero)]
    levels = LEVELS[layer.spec.format][codes.int()] if layer.spec.format in LEVELS else codes.float()
    torch.testing.assert_close(spread[0] * (levels - spread[1]), layer.dequantize(), rtol=1e-6, atol=0)
    again = QuantLinear.pack(codes, scale, zero if layer.spec.asymmetric else None, layer.spec, layer.bias)
    assert torch.equal(again.unpack()[0], codes)
    torch.testing.assert_close(again.dequantize(), layer.dequantize(), rtol=2e-3, atol=1e-6)


def test_from_packed_holds_the_very_tensor_and_refuses_another_shape(layer, x):
    same = QuantLinear.from_packed(layer.weight, 33, 100, layer.spec, layer.bias)
    assert same.weight is layer.weight and torch.equal(same(x), layer(x))
    with pytest.raises(ValueError, match=r"from_packed: weight must be uint8 of shape .*n=33 k=100, got uint8 \[2, "):
        QuantLinear.from_packed(layer.weight[:2], 33, 100, layer.spec)
    with pytest.raises(ValueError, match=r"from_packed: weight must be uint8 .*, got float32 \[33, 100\]"):
        QuantLinear.from_packed(torch.zeros(33, 100), 33, 100, layer.spec)


def test_to_linear_gives_back_a_plain_layer(layer, x):
    plain = layer.to_linear(torch.bfloat16)
    assert type(plain) is nn.Linear and plain.weight.dtype == plain.bias.dtype == torch.bfloat16
    assert torch.equal(plain.weight, layer.dequantize(torch.bfloat16)) and plain.weight.requires_grad
    assert plain.bias is not layer.bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_to_dtype_leaves_the_packed_weight_and_takes_the_bias_along(layer, dtype):
    weight = layer.weight.clone()
    layer.to(dtype)
    assert torch.equal(layer.weight, weight) and layer.weight.dtype == torch.uint8
    assert layer.bias.dtype == dtype and layer.layout.dtype == torch.int64


def test_deepcopy_and_pickle_are_independent_copies_with_the_same_result(layer, x):
    wanted = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.spec == layer.spec and copied.weight.data_ptr() != layer.weight.data_ptr()
        assert torch.equal(copied(x), wanted)


def test_a_whole_model_survives_torch_save(config, model, x):
    lowbit.quantize_(model, config)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_weight_and_bias_are_read_where_functional_call_puts_them(layer, x):
    bias = torch.randn(33)
    y = torch.func.functional_call(layer, {"bias": bias}, x)
    torch.testing.assert_close(y - bias, layer(x) - layer.bias, rtol=1e-4, atol=1e-5)


def test_the_constructor_makes_an_unset_layer_without_a_float_weight():
    layer = QuantLinear(100, 33, spec=LinearSpec("int4", 32), dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.uint8 and layer.bias.dtype == torch.bfloat16
    assert QuantLinear(100, 33, bias=False, spec=LinearSpec("int4", 32), device="meta").bias is None


def test_reset_parameters_is_refused(layer):
    with pytest.raises(RuntimeError, match="QuantLinear: a packed weight has no initial value"):
        layer.reset_parameters()


def test_parameters_are_one_frozen_byte_tensor_and_the_bias(layer):
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == {"weight": False, "bias": True}
    assert list(layer.state_dict()) == ["weight", "bias", "layout"]
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 100)).sum().backward()
    before = layer.weight.clone()
    optimizer.step()
    assert torch.equal(layer.weight, before)
