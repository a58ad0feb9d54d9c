# SPDX-License-Identifier: Apache-2.0
"""dequantize_: back to nn.Linear in place, with what the packed weights stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant.gated_mlp import FusedGatedMLP


def test_every_layer_becomes_the_nn_linear_of_its_decoded_weight(config, model, x):
    first, bias = model[0], model[0].bias
    lowbit.quantize_(model, config)
    weights = {
        name: module.dequantize() for name, module in model.named_modules() if isinstance(module, lowbit.QuantLinear)
    }
    assert lowbit.dequantize_(model) == list(weights)
    assert model[0] is first and type(first) is nn.Linear and first.bias is bias
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight, weight) and layer.weight.requires_grad
    fresh = nn.Sequential(
        nn.Linear(100, 33), nn.ReLU(), nn.Sequential(nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 9))
    )
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x)) and "layout" not in "".join(model.state_dict())
    assert lowbit.dequantize_(model) == []


def test_it_can_be_quantized_again_copied_and_pickled(config, model, x):
    lowbit.quantize_(model, config)
    lowbit.dequantize_(model)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    report = lowbit.quantize_(model, config)
    assert len(report.quantized) == 3 and model(x).isfinite().all()


def test_shared_weights_stay_shared():
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].weight = model[0].weight
    lowbit.quantize_(model, lowbit.int8_weight_only())
    lowbit.dequantize_(model)
    assert model[0].weight is model[1].weight and model[2].weight is not model[0].weight


def test_the_dtype_is_that_of_the_bias_or_of_the_model_or_the_one_asked_for(model):
    model.to(torch.bfloat16)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    half = copy.deepcopy(model)
    lowbit.dequantize_(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    lowbit.dequantize_(half, torch.float32)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="dequantize_: dtype must be a float dtype or None, got dtype=torch.int8"):
        lowbit.dequantize_(half, torch.int8)


def test_a_fused_gated_mlp_becomes_what_it_was(gated_mlp):
    kind, x = type(gated_mlp["mlp"]), torch.randn(3, 64)
    lowbit.quantize_(gated_mlp, lowbit.int8_weight_only())
    lowbit.fuse_gated_mlps(gated_mlp)
    fused = gated_mlp["mlp"](x)
    assert isinstance(gated_mlp["mlp"], FusedGatedMLP)
    lowbit.dequantize_(gated_mlp)
    assert type(gated_mlp["mlp"]) is kind
    torch.testing.assert_close(gated_mlp["mlp"](x), fused, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [lambda model: lowbit.quantize_(model, lowbit.int8_weight_only()), lambda model: lowbit.sparsify_(model, lowbit.block_sparse_weight(16))], ids=["packed", "blocks"])
def test_conv1d_becomes_conv1d_again_and_its_file_loads(change, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model, ids = transformers.GPT2Model(sizes).eval(), torch.randint(0, 50, (1, 5))
    kinds = {name: type(module) for name, module in model.named_modules()}
    inside = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        change(model)
        wanted = model(ids).last_hidden_state
        lowbit.dequantize_(model)
        got = model(ids).last_hidden_state
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {name: set(vars(module)) for name, module in model.named_modules()} == inside
    model.save_pretrained(tmp_path)
    loaded, info = transformers.GPT2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, got)


class Scaled(nn.Linear):
    """Computes as an nn.Linear does, and has a class of its own."""


def test_a_subclass_that_was_taken_by_name_comes_back():
    model = nn.Sequential(Scaled(40, 20))
    lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "0")
    lowbit.dequantize_(copy.deepcopy(model))
    lowbit.dequantize_(model)
    assert type(model[0]) is Scaled and "float_class" not in vars(model[0])


def test_on_the_meta_device_and_by_itself():
    with torch.device("meta"):
        model = nn.Linear(40, 20)
    lowbit.quantize_(model, lowbit.int4_weight_only())
    assert lowbit.dequantize_(model) == [""] and model.weight.is_meta and model.weight.shape == (20, 40)
