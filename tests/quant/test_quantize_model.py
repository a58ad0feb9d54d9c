# SPDX-License-Identifier: Apache-2.0
"""quantize_: what it changes, what it reports, and that it changes nothing when it refuses."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from expert_modules import Experts
from torch import nn

import lowbit
from lowbit.quant import QuantLinear, quantize, quantize_

LEAST_DB = {"float32": math.inf, "bfloat16": 45, "int8": 35, "int4": 12, "int3": 9, "nf4": 12, "fp4": 12, "fp8_e4m3": 25}


def test_every_linear_is_replaced_in_place_and_the_output_stays_close(config, model, x):
    wanted, first = model(x), model[0]
    report = quantize_(model, config)
    assert model[0] is first and isinstance(first, QuantLinear)
    assert [row.layer for row in report.quantized] == ["0", "2.0", "2.2"] and not report.skipped
    for row in report.quantized:
        layer = model.get_submodule(row.layer)
        assert row.format == layer.spec.name and row.shape == (layer.out_features, layer.in_features)
        assert row.bytes_after == layer.weight.nbytes == layer.spec.bytes(*row.shape)
        assert row.bytes_before == 4 * row.shape[0] * row.shape[1]
        assert row.error_db >= LEAST_DB[layer.spec.format]
    error = (model(x) - wanted).norm() / wanted.norm()
    assert error < {"int3": 0.4, "int4": 0.25, "nf4": 0.25, "fp4": 0.25, "fp8_e4m3": 0.08}.get(config.spec(torch.float32).format, 0.03)


def test_error_db_is_the_distance_of_the_dequantized_weight(config, model):
    weight = model[0].weight.detach().double()
    row = quantize_(model, config).rows[0]
    noise = (weight - model[0].dequantize().double()).square().sum()
    wanted = 10 * math.log10(weight.square().sum() / noise) if noise else math.inf
    assert row.error_db == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_float_dtype_are_taken_and_activations_keep_theirs(config, model, x, dtype):
    model.to(dtype)
    wanted = model(x.to(dtype)).float()
    quantize_(model, config)
    y = model(x.to(dtype))
    assert y.dtype == dtype
    assert (y.float() - wanted).norm() / wanted.norm() < (0.4 if "int3" in str(config) else 0.25)


def test_a_linear_by_itself_is_quantized_in_place(config):
    linear = nn.Linear(40, 20)
    report = quantize_(linear, config)
    assert isinstance(linear, QuantLinear) and linear(torch.randn(3, 40)).shape == (3, 20)
    assert "(the model)" in repr(report)


def test_hooks_training_mode_and_the_bias_parameter_survive(model, x):
    calls, bias = [], model[0].bias
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].eval()
    quantize_(model, lowbit.int8_weight_only())
    model(x)
    assert calls == [1] and model[0].bias is bias and bias.requires_grad
    assert not model[0].training and model[2][0].training
    assert not model[0].weight.requires_grad


def test_a_layer_used_in_two_places_is_quantized_once_and_stays_one(x):
    shared = nn.Linear(100, 100)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    report = quantize_(model, lowbit.int8_weight_only())
    assert model["a"] is model["b"][0] and len(report.quantized) == 1


def test_filter_fn_selects_by_module_and_name_and_the_rest_is_reported(model):
    report = quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "2.0")
    assert type(model[0]) is nn.Linear and isinstance(model[2][0], QuantLinear)
    assert [(row.layer, row.note) for row in report.skipped] == [(layer, "not selected by filter_fn") for layer in ("0", "2.2")]


def test_layers_can_have_different_formats_by_two_calls_with_filters(model, x):
    quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "0")
    report = quantize_(model, lowbit.int4_weight_only(32), lambda module, name: type(module) is nn.Linear)
    assert [row.layer for row in report.quantized] == ["2.0", "2.2"]
    assert model(x).isfinite().all()


def test_no_hit_is_said_and_strict_raises(model):
    assert "no layer was selected" in repr(quantize_(model, lowbit.int8_weight_only(), lambda *_: False))
    assert "no nn.Linear" in repr(quantize_(nn.Sequential(nn.ReLU()), lowbit.int8_weight_only()))
    with pytest.raises(ValueError, match="strict=True .*: the model has no nn.Linear"):
        quantize_(nn.Sequential(nn.ReLU()), lowbit.int8_weight_only(), strict=True)
    with pytest.raises(ValueError, match="strict=True .*0: not selected by filter_fn"):
        quantize_(model, lowbit.int8_weight_only(), lambda *_: False, strict=True)


class OwnLinear(nn.Linear):
    pass


class OtherForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_layers_whose_weight_others_may_read_are_skipped_and_reported_with_the_reason():
    norm = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"own": OwnLinear(8, 16), "attention": attention, "norm": norm, "patched": nn.Linear(8, 8), "plain": nn.Linear(8, 16)})
    model["patched"].forward = lambda x: x
    report = quantize_(model, lowbit.int8_weight_only())
    assert [row.layer for row in report.quantized] == ["own", "plain"]
    notes = {row.layer: row.note for row in report.skipped}
    assert "MultiheadAttention reads its weight" in notes["attention.out_proj"]
    assert "its weight is computed from other parameters" in notes["norm"]
    assert "replaced on the instance" in notes["patched"]
    assert model["attention"](*[torch.randn(3, 2, 8)] * 3)[0].shape == (3, 2, 8)


def test_strict_lists_what_the_default_filter_would_skip():
    model = nn.ModuleDict({"own": OtherForward(8, 8), "plain": nn.Linear(8, 16)})
    with pytest.raises(ValueError, match="with strict=True every linear layer must be one that can be quantized: own: OtherForward"):
        quantize_(model, lowbit.int8_weight_only(), strict=True)
    assert type(model["plain"]) is nn.Linear


def test_a_layer_that_computes_otherwise_is_refused_when_asked_for(subtests):
    for module, reason in ((OtherForward(8, 8), "OtherForward, a subclass"), (nn.MultiheadAttention(8, 2), "MultiheadAttention")):
        with subtests.test(reason), pytest.raises(ValueError, match=f"cannot be quantized: .*{reason}"):
            quantize_(nn.ModuleDict({"m": module}), lowbit.int8_weight_only(), lambda m, _: isinstance(m, nn.Linear))


def quantized_already(layer: nn.Module) -> None:
    quantize_(layer, lowbit.int4_weight_only())


OF_ARGUMENTS = [
    ({"config": 8}, TypeError, "config must be a configuration such as .*, got int"),
    ({"config": "int8_weights"}, ValueError, "config: 'int8_weights' must begin with one of .*; the nearest are int8_weight_only"),
    ({"config": "int8_weight_only(groupsize=32)"}, ValueError, "config: .*unexpected keyword argument 'groupsize'; the nearest is group_size"),
    ({"filter_fn": lambda n, m: isinstance(m, nn.Linear)}, TypeError, r"filter_fn must be a function of \(module, qualified name\), .*the wrong way round"),
    ({"filter_fn": lambda n, m: n.startswith("2") and isinstance(m, nn.Linear)}, TypeError, "filter_fn must .*the wrong way round"),
    ({"filter_fn": lambda n, m: "2.2" in n}, TypeError, "filter_fn must .*the wrong way round"),
    ({"config": lowbit.int8_weight_only}, TypeError, "config must .*, got Int8WeightOnlyConfig"),
    ({"config": lowbit.Int8WeightOnlyConfig}, TypeError, "config must .*, got Int8WeightOnlyConfig"),
    ({"filter_fn": lambda m, n: True}, TypeError, "filter_fn must select nn.Linear, nn.Embedding and experts layers only, got the model itself: Seq"),
    ({"filter_fn": lambda m, n: n != "" and "2" not in n}, TypeError, "filter_fn must select .*, got 1: ReLU"),
    ({"device": "cuda"}, ValueError, r"device must be None or have kernels here, got device='cuda' \(linear: the kernels for cuda cannot run here: "),
]  # fmt: skip
OF_LAYERS = [
    (lambda layer: layer.weight.data[3].fill_(math.nan), ValueError, "weight of 2.2 must be finite, got inf or nan"),
    (lambda layer: layer.double(), TypeError, "weight of 2.2 must be float32, bfloat16 or float16, got torch.float64"),
    (lambda layer: setattr(layer.bias, "data", layer.bias.data.double()), TypeError, "bias of 2.2 must be float32, bfloat16 or float16, got torch.float64"),
    (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(6, 65))), ValueError, r"weight of 2.2 must have shape \[9, 65\], got \[6, 65\]"),
    (quantized_already, ValueError, "2.2 is already quantized as int4 g128"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "arguments", "kind", "text"),
    [(None, *case) for case in OF_ARGUMENTS] + [(prepare, {}, *rest) for prepare, *rest in OF_LAYERS],
)
def test_a_refused_call_names_the_culprit_and_leaves_the_model_untouched(model, x, prepare, arguments, kind, text):
    if prepare:
        prepare(model[2][2])
    before = copy.deepcopy(model.state_dict())
    types = [type(module) for module in model.modules()]
    with pytest.raises(kind, match=f"quantize_: {text}"):
        quantize_(model, **{"config": lowbit.int8_weight_only()} | arguments)
    assert types == [type(module) for module in model.modules()]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before)


def test_the_same_weight_packs_to_the_same_bytes_padding_included(config, model):
    layers = [QuantLinear.from_linear(model[0], config.spec(torch.float32)) for _ in range(2)]
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match="quantize_: model must be a torch.nn.Module, got Tensor"):
        quantize_(torch.zeros(2, 2), lowbit.int8_weight_only())


def test_a_parameter_of_another_kind_is_refused():
    class Wrapped(torch.Tensor):
        pass

    model = nn.Sequential(nn.Linear(4, 16))
    model[0].weight = nn.Parameter(torch.zeros(16, 4).as_subclass(Wrapped))
    with pytest.raises(TypeError, match="weight of 0 must be a plain nn.Parameter, got Wrapped"):
        quantize_(model, lowbit.int8_weight_only())


def test_a_weight_too_large_for_float16_is_refused_before_it_becomes_inf(model):
    model[0].weight.data[0, 0] = -7e4
    with pytest.raises(ValueError, match=r"weight of 0 must be within \+-65504 for float16, got 70000"):
        quantize_(model, lowbit.float_weight(torch.float16))


def test_device_cpu_is_accepted(model, x):
    quantize_(model, lowbit.int8_weight_only(), device="cpu")
    assert model(x).isfinite().all()


@pytest.mark.parametrize("weight", [torch.zeros(33, 100), torch.randn(100, 33).T], ids=["zero", "strided"])
def test_zero_and_strided_weights(config, x, weight):
    linear = nn.Linear(100, 33)
    linear.weight = nn.Parameter(weight)
    wanted = linear(x)
    quantize_(nn.Sequential(linear), config)
    assert (linear(x) - wanted).norm() <= 0.25 * wanted.norm()


def test_two_linears_with_one_parameter_share_one_packed_parameter(config):
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].weight = model[0].weight
    report = quantize_(model, config)
    assert model[0].weight is model[1].weight and model[0].bias is not model[1].bias
    assert [row.note for row in report.rows] == ["", "shares the weight of 0"]
    assert report.bytes_after == model[0].weight.nbytes and report.rows[1].bytes_after == 0


def test_a_linear_tied_to_an_embedding_is_untied_and_the_report_says_so(config):
    model = nn.ModuleDict({"embed": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    wanted = model["embed"].weight.detach().clone()
    report = quantize_(model, config)
    assert report.rows[0].note == "untied from embed.weight, which stays float"
    assert torch.equal(model["embed"].weight, wanted) and model["embed"].weight.requires_grad
    assert model["head"](model["embed"](torch.tensor([1, 2]))).shape == (2, 50)


class Bar:
    """tqdm's, as far as the progress of quantize_ needs it."""

    made: list[Bar] = []

    def __init__(self, *, total: int, **options: str) -> None:
        self.total, self.options, self.n, self.steps = total, options, 0, []
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.n += count
        self.steps.append(self.n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.options["closed"] = "yes"


def test_a_large_model_gets_a_progress_bar_of_layers_and_a_missing_tqdm_is_noted(model, monkeypatch):
    tqdm_auto = pytest.importorskip("tqdm.auto")
    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    quantize_(copy.deepcopy(model), lowbit.int8_weight_only())
    assert not Bar.made
    monkeypatch.setattr(quantize, "PROGRESS_BYTES", 1)
    shared = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), Experts(), nn.Linear(64, 8)])
    shared[1].weight = shared[0].weight
    quantize_(shared, lowbit.int8_weight_only())
    (bar,) = Bar.made
    assert (bar.total, bar.steps, bar.options) == (4, [2, 3, 3, 4], {"desc": "quantize_", "unit": "layer", "closed": "yes"})
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert "install tqdm" in repr(quantize_(model, lowbit.int8_weight_only()))


def test_on_the_meta_device_only_the_structure_changes(config):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 33), nn.Linear(33, 9))
    report = quantize_(model, config)
    assert model[0].weight.device.type == "meta" and math.isnan(report.rows[0].error_db)
    assert report.bytes_after == sum(layer.weight.nbytes for layer in model)
