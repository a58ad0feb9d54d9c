# SPDX-License-Identifier: Apache-2.0
"""lowbit.smooth_: what a model computes is kept, quantized outputs come nearer, and what does not fit is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from decoders import logits, prompt
from test_rotate import FIT, distance, model_of, same, state
from torch import Tensor, nn

import lowbit

W4 = lowbit.int4_weight_only(group_size=32)


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randint(2, 90, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def with_outliers(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Some gains of norms, and some values and products, are far larger than the others."""
    model = model_of(name, dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "layernorm" in key:
                parameter[::9] += 12
            elif parameter.dim() > 1 and any(part in key for part in ("up_proj", "v_proj")):
                parameter[::7] *= 12
    return model


@pytest.mark.parametrize("name", FIT)
def test_the_model_computes_what_it_did(name: str) -> None:
    model = with_outliers(name, torch.float64)
    wanted, parameters = logits(model, prompt()), dict(model.named_parameters())
    report = lowbit.smooth_(model, batches(), W4)
    assert any(row.alpha for row in report.rows) and report.difference < 1e-5
    assert distance(logits(model, prompt()), wanted) < 1e-5
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())


def errors(model: nn.Module) -> list[float]:
    """Of each linear layer of the layers, in float and packed: how far its outputs are apart, on the same inputs."""
    packed, found = copy.deepcopy(model), []
    lowbit.quantize_(packed, W4, calibration=batches())

    def compare(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
            found.append(distance(packed.get_submodule(name)(args[0]), result))

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "proj" in name:
            layer.register_forward_hook(compare(name))
    logits(model, prompt())
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "tied"])
def test_quantized_outputs_come_nearer(name: str) -> None:
    model = with_outliers(name)
    before = errors(copy.deepcopy(model))
    report = lowbit.smooth_(model, batches(), W4)
    after = errors(model)
    assert sum(after) < 0.95 * sum(before)
    assert len(report.rows) == 8 and all(row.gained_db >= 0 for row in report.rows)
    assert "dB smaller" in repr(report)


def test_a_calibration_and_any_format_are_taken() -> None:
    model = with_outliers("llama")
    wanted = logits(model, prompt())
    calibration = lowbit.calibrate(model, batches())
    for config in (lowbit.int8_weight_only(), lowbit.nf4_weight_only(64), lowbit.int4_weight_only(32, algorithm=lowbit.HQQ())):
        lowbit.smooth_(copy.deepcopy(model), calibration, config)
    one = copy.deepcopy(model)
    default = lowbit.smooth_(model, calibration)
    assert default.rows == lowbit.smooth_(one, calibration, lowbit.int8_dynamic_activation_int4_weight(32)).rows
    assert distance(logits(model, prompt()), wanted) < 1e-5


def test_channels_without_input_and_models_without_outliers_keep_finite_scales() -> None:
    model = with_outliers("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3:9] = 0
        model.model.layers[1].post_attention_layernorm.weight.zero_()
    wanted = logits(model, prompt())
    report = lowbit.smooth_(model, batches(), W4)
    assert distance(logits(model, prompt()), wanted) < 1e-5
    assert report.rows[6].alpha == 0


def test_smoothed_and_rotated() -> None:
    model = with_outliers("qwen2")
    wanted = logits(model, prompt())
    lowbit.smooth_(model, batches(), W4)
    lowbit.rotate_(model)
    lowbit.smooth_(model, batches(), W4)
    assert distance(logits(model, prompt()), wanted) < 1e-5


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    model = with_outliers("llama")
    before = state(model)
    calibration = lowbit.calibrate(model, batches())
    del calibration.layers["model.layers.1.mlp.down_proj"]
    with pytest.raises(ValueError, match="smooth_: calibration must reach model.layers.1.mlp.down_proj, whose inputs have k=96, got none"):
        lowbit.smooth_(model, calibration)
    with pytest.raises(ValueError, match="smooth_: config: .* must begin with one of"):
        lowbit.smooth_(model, calibration, "int4")
    with pytest.raises(TypeError, match="calibrate: batches must be an iterable of inputs"):
        lowbit.smooth_(model, prompt())
    with pytest.raises(ValueError, match="smooth_: model.layers.0.input_layernorm must be an RMSNorm of 64 channels, got LayerNorm"):
        lowbit.smooth_(model_of("stablelm"), batches())
    assert same(model, before)
    lowbit.quantize_(model, W4)
    with pytest.raises(ValueError, match="smooth_: lm_head must be float, got int8.*: call smooth_ before quantize_"):
        lowbit.smooth_(model, batches())
