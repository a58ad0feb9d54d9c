# SPDX-License-Identifier: Apache-2.0
"""Refusals of quantization-aware training: named, and with nothing half converted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.training import FakeQuantizedLinear, QATConfig

INT4 = lowbit.int8_dynamic_activation_int4_weight(32)
Make = Callable[..., nn.Module]


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((None,), TypeError, "base_config must be a configuration such as lowbit.int8_weight_only.., got NoneType"),
        ((4,), TypeError, "base_config must be a configuration such as lowbit.int8_weight_only.., got int"),
        ((lowbit.float_weight(),), ValueError, r"base_config must have codes, got float_weight\(\)"),
        ((lowbit.semi_sparse_weight(),), ValueError, r"base_config must not prune, got semi_sparse_weight\(.*\): train"),
        (
            (lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()),),
            ValueError,
            "must leave algorithm out, got int4_weight",
        ),
        (
            (lowbit.int4_weight_only(32, algorithm=lowbit.HQQ()),),
            ValueError,
            "must leave algorithm out, got int4_weight",
        ),
        (
            (lowbit.int4_weight_only(32, scale="search"),),
            ValueError,
            "must not search for scales, got int4_weight_only",
        ),
    ],
)
def test_a_configuration_without_a_rule_is_refused_by_name(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"QATConfig: .*{text}"):
        QATConfig(*arguments)


def test_a_step_and_options_that_are_not_there_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="step must be 'prepare' or 'convert', got step='train'"):
        QATConfig(INT4, step="train")
    with pytest.raises(ValueError, match=r"device must be None with QATConfig\(.*step='prepare'\), got a str"):
        lowbit.quantize_(model, QATConfig(INT4), device="cpu")
    with pytest.raises(ValueError, match="calibration must be None with QATConfig"):
        lowbit.quantize_(model, QATConfig(INT4), calibration=[torch.randn(1, 100)])
    with pytest.raises(ValueError, match=r"must have codes, got float_weight\(\)"):
        lowbit.quantize_(model, QATConfig(INT4), head=lowbit.float_weight())
    assert all(type(module) is not FakeQuantizedLinear for module in model.modules())


def test_a_layer_is_made_of_a_float_one_only() -> None:
    with pytest.raises(TypeError, match=r"FakeQuantizedLinear: quantize_\(model, QATConfig\(config\)\) makes one"):
        FakeQuantizedLinear(4, 4)


def test_searched_scales_may_be_where_learned_ones_begin() -> None:
    assert QATConfig(lowbit.int4_weight_only(32, scale="search"), learned_scales=True).learned_scales


@pytest.mark.parametrize("again", [QATConfig(INT4), lowbit.int8_weight_only(), INT4], ids=str)
def test_a_prepared_model_is_neither_prepared_nor_quantized_again(prepared: Make, again: Any) -> None:
    model = prepared(INT4)
    with pytest.raises(ValueError, match="0 is being trained as int4 g32 int8-activations"):
        lowbit.quantize_(model, again)
    assert type(model[0]) is FakeQuantizedLinear and model[0].spec.name == "int4 g32 int8-activations"


def test_a_quantized_model_is_not_prepared(model: nn.Module) -> None:
    lowbit.quantize_(model, INT4)
    with pytest.raises(ValueError, match="0 is already quantized as int4 g32"):
        lowbit.quantize_(model, QATConfig(INT4))
    with pytest.raises(ValueError, match="needs layers prepared for int8_dynamic.*, got layers prepared for none"):
        lowbit.quantize_(model, QATConfig(INT4, step="convert"))


def test_a_model_is_converted_by_what_prepared_it(prepared: Make) -> None:
    model = prepared(INT4)
    other = lowbit.int4_weight_only(32)
    with pytest.raises(
        ValueError, match=r"QATConfig\(int4_weight_only.*got layers prepared for int8_dynamic_activation_int4_weight"
    ):
        lowbit.quantize_(model, QATConfig(other, step="convert"))
    assert type(model[0]) is FakeQuantizedLinear


@pytest.mark.parametrize("key, learned_scales", [("weight", False), ("weight", True), ("weight_scale", True)])
def test_what_is_not_finite_is_not_converted(prepared: Make, key: str, learned_scales: bool) -> None:
    model = prepared(INT4, learned_scales=learned_scales)
    with torch.no_grad():
        getattr(model[4], key)[0, 0] = torch.nan
    assert model(torch.randn(3, 100)).isnan().any()  # and training sees it
    with pytest.raises(ValueError, match=f"{key} of 4 must be finite, got inf or nan"):
        lowbit.quantize_(model, QATConfig(INT4, step="convert"))
    assert type(model[0]) is FakeQuantizedLinear


def test_weights_of_other_steps_are_not_loaded_and_change_nothing(prepared: Make) -> None:
    trained, converted = prepared(INT4), prepared(INT4)
    lowbit.quantize_(converted, QATConfig(INT4, step="convert"))
    with torch.no_grad():
        trained[0].bias += 1
    kept, x = copy.deepcopy(trained.state_dict()), torch.randn(3, 100)
    with pytest.raises(ValueError, match="0.weight must be float, as the layer is being trained, got uint8"):
        trained.load_state_dict(converted.state_dict())
    assert all(torch.equal(value, kept[key]) for key, value in trained.state_dict().items())
    y = converted(x)
    with pytest.raises(ValueError, match="0.weight must be packed as int4 g32"):
        converted.load_state_dict(trained.state_dict())
    assert torch.equal(converted(x), y)


def test_layers_of_several_configurations_are_converted_one_after_the_other(model: nn.Module) -> None:
    int2 = lowbit.intx_weight_only(torch.int2, 32)
    first = lambda module, name: name == "0"  # noqa: E731
    lowbit.quantize_(model, QATConfig(INT4), first)
    lowbit.quantize_(model, QATConfig(int2), lambda module, name: name in ("2", "4"))
    report = lowbit.quantize_(model, QATConfig(int2, step="convert"), lambda module, name: name != "4")
    assert report.notes == ["2 layers are still being trained"] and type(model[2]) is lowbit.QuantLinear
    lowbit.quantize_(model, QATConfig(step="convert"), first)
    assert type(model[0]) is nn.Linear and "weight_scale" not in model[0]._parameters
    lowbit.quantize_(model, QATConfig(int2, step="convert"))
    assert [type(model[i]).__name__ for i in (0, 2, 4)] == ["Linear", "QuantLinear", "QuantLinear"]
