# SPDX-License-Identifier: Apache-2.0
"""Weights that are trained as int8 codes: stochastic rounding, optimizers, state dicts, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit.training import Int8WeightLinear, Int8WeightOnlyQuantizedTrainingConfig
from lowbit.training.int8_weight import Int8Weight

PREPARE = Int8WeightOnlyQuantizedTrainingConfig()
CONVERT = Int8WeightOnlyQuantizedTrainingConfig(step="convert")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "AdamW8bit": lambda params: lowbit.optim.AdamW8bit(params, lr=3e-3, min_8bit_size=0),
    "AdamW4bit": lambda params: lowbit.optim.AdamW4bit(params, lr=3e-3),
}
by_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.fixture
def trained(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    lowbit.quantize_(made, PREPARE)
    return made


def weights_of(model: nn.Module) -> list[Int8Weight]:
    return [module.weight for module in model.modules() if isinstance(module, Int8WeightLinear)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_codes_are_the_nearest_ones(dtype: torch.dtype) -> None:
    weight = torch.randn(33, 100).to(dtype)
    made = Int8Weight.from_float(weight)
    scale = weight.double().abs().amax(1) / 127
    assert made.dtype is dtype and made.codes.dtype is torch.int8 and made.scale.dtype is torch.float32
    torch.testing.assert_close(made.scale.double(), scale, rtol=2**-23, atol=0)
    error = (made.values().double() - weight.double()).abs()
    assert (error <= 0.50001 * scale.unsqueeze(1)).all() and (made.codes.abs().amax(1) == 127).all()
    assert torch.equal(made.dequantize(), made.values().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mean_of_many_roundings_is_what_was_written(dtype: torch.dtype) -> None:
    """A tenth of a step, which the nearest code loses; 4 standard deviations of a mean of 4000."""
    count = 4000
    start = torch.tensor([[127, -64, 3, 0, -127]]).repeat(count, 1) / 128.0
    weight = nn.Parameter(Int8Weight.from_float(start.to(dtype)))
    values = weight.values().double()
    step = 0.1 * weight.scale[0].item()
    with torch.no_grad():
        weight.add_(torch.tensor([0.0, step, step, step, 0.0]))
    assert weight.codes[:, [0, 4]].abs().eq(127).all()  # they hold the scale
    moved = (weight.values().double() - values)[:, 1:4].mean(0)
    tolerance = 4 * weight.scale[0].item() * (0.1 * 0.9 / count) ** 0.5
    assert (moved - step).abs().max() < tolerance
    assert len(weight.codes[:, 1].unique()) == 2  # of the two codes around it alone


def test_the_seed_of_torch_decides(trained: nn.Module) -> None:
    twin = copy.deepcopy(trained)
    for model, seed in ((trained, 1), (twin, 1)):
        torch.manual_seed(seed)
        with torch.no_grad():
            model[0].weight.mul_(0.9).add_(0.001)
    assert torch.equal(trained[0].weight.codes, twin[0].weight.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_outputs_and_gradients_are_those_of_a_float_layer_of_its_values(dtype: torch.dtype, autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(100, 33)).to(dtype)
    x, grad = torch.randn(2, 9, 100).to(dtype), torch.randn(2, 9, 33)
    lowbit.quantize_(model, PREPARE)
    layer, found = model[0], []
    plain = nn.Linear(100, 33).to(dtype)
    plain.load_state_dict({"weight": layer.weight.dequantize(), "bias": layer.bias})
    for each in (layer, plain):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            y = each(inputs)
        y.backward(grad.to(y.dtype))
        found.append((y.detach(), inputs.grad, each.weight.grad, each.bias.grad))
    for ours, wanted in zip(*found, strict=True):
        assert type(ours) is Tensor and ours.dtype is wanted.dtype
        torch.testing.assert_close(ours, wanted)


def test_checkpointing_and_compiled_graphs_give_the_same(trained: nn.Module) -> None:
    x = torch.randn(9, 100)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        trained.zero_grad()
        call(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in trained.parameters()]

    eager = gradients(trained)
    compiled = torch.compile(trained, fullgraph=True, backend="aot_eager")
    for call in (lambda x: checkpoint(trained, x, use_reentrant=False), compiled):
        assert all(torch.equal(*pair) for pair in zip(eager, gradients(call), strict=True))
    with torch.no_grad():
        trained[0].weight.mul_(2)
    assert torch.equal(compiled(x), trained(x))


@by_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_learns_as_in_float(
    model: nn.Module, train: Callable[..., list[Tensor]], make: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    model, falls = model.to(dtype), []
    trained = copy.deepcopy(model)
    lowbit.quantize_(trained, PREPARE)
    for each in (model, trained):
        losses = train(each, 80, make(each.parameters()))
        falls.append(float(losses[0] - torch.stack(losses[-10:]).mean()))
    assert falls[0] > 0.1 and falls[1] > 0.85 * falls[0]
    assert all(type(weight) is Int8Weight and weight.codes.dtype is torch.int8 for weight in weights_of(trained))


def test_memory_is_a_byte_for_each_weight(model: nn.Module) -> None:
    report = lowbit.quantize_(model, PREPARE)
    assert [row.bytes_after for row in report.rows] == [33 * 104, 65 * 37, 9 * 69]
    assert report.model_bytes_after == report.bytes_after + 4 * (33 + 9)  # and the biases
    assert all(weight.untyped_storage().nbytes() == 0 or weight.data_ptr() == 0 for weight in weights_of(model))


def test_the_state_dict_is_plain_and_loads(
    model: nn.Module, trained: nn.Module, train: Callable[..., list[Tensor]]
) -> None:
    train(trained)
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(value) is Tensor for value in state.values())
    assert state["0.weight"].dtype is torch.int8 and state["0.weight_scale"].shape == (33,)
    fresh = copy.deepcopy(model)
    lowbit.quantize_(fresh, PREPARE)
    with torch.no_grad():
        fresh[0].weight.mul_(2)
    for assign in (False, True):
        fresh.load_state_dict(copy.deepcopy(state), assign=assign)
        x = torch.randn(5, 100)
        assert torch.equal(fresh(x), trained(x)) and type(fresh[0].weight) is Int8Weight


@by_optimizer
def test_a_resumed_training_is_the_uninterrupted_one(
    model: nn.Module, trained: nn.Module, train: Callable[..., list[Tensor]], make: Callable[[Any], Any]
) -> None:
    resumed, optimizer = copy.deepcopy(trained), make(trained.parameters())
    train(trained, 4, optimizer)
    resumed.load_state_dict(trained.state_dict())
    again = make(resumed.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, steps in ((trained, optimizer), (resumed, again)):
        torch.manual_seed(3)
        train(each, 4, steps, first=4)
    pairs = zip(*(each.state_dict().values() for each in (trained, resumed)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_state_dict_of_another_step_is_named(model: nn.Module, trained: nn.Module) -> None:
    kept = copy.deepcopy(trained.state_dict())
    with pytest.raises(RuntimeError, match=r"0.weight must be int8.*of an int8 weight, got float32"):
        trained.load_state_dict({**kept, "0.weight": model[0].weight.detach()})
    with pytest.raises(RuntimeError, match=r"Missing key.*0.weight_scale"):
        trained.load_state_dict({key: value for key, value in kept.items() if key != "0.weight_scale"})
    assert all(torch.equal(value, kept[key]) for key, value in trained.state_dict().items())


def test_what_was_trained_is_what_is_converted(trained: nn.Module, train: Callable[..., list[Tensor]]) -> None:
    train(trained)
    values, x = [weight.values() for weight in weights_of(trained)], torch.randn(9, 100)
    y = trained(x)
    report = lowbit.quantize_(trained, CONVERT)
    layers = [module for module in trained.modules() if isinstance(module, lowbit.QuantLinear)]
    assert [row.format for row in report.rows] == ["int8 per-channel"] * 3 and not weights_of(trained)
    for layer, wanted in zip(layers, values, strict=True):
        assert torch.equal(layer.dequantize(), wanted)
    torch.testing.assert_close(trained(x), y)
    assert lowbit.quantize_(trained, CONVERT).notes == ["no layer was selected"]


def test_a_row_with_nan_becomes_nan_and_is_not_converted(trained: nn.Module) -> None:
    update = torch.zeros(33, 100)
    update[1, 5], update[2, 6] = torch.nan, torch.inf
    with torch.no_grad():
        trained[0].weight.add_(update)
    values = trained[0].weight.dequantize()
    assert values[1:3].isnan().all() and values[3:].isfinite().all() and values[0].isfinite().all()
    with pytest.raises(ValueError, match="weight of 0 must be finite, got inf or nan"):
        lowbit.quantize_(trained, CONVERT)
    assert type(trained[0]) is Int8WeightLinear


@pytest.mark.parametrize(
    "call",
    [
        lambda weight: weight.T,
        lambda weight: weight.data[0].zero_(),
        lambda weight: weight.view(-1),
        lambda weight: functional.linear(torch.randn(1, 100), weight),
        lambda weight: torch._foreach_mul_([weight.data], 2.0),
        lambda weight: torch.add(torch.zeros(33, 100), 1, out=weight.data),
    ],
    ids=["transposed", "a row", "a view", "linear", "foreach", "out"],
)
def test_views_and_writes_of_several_are_refused_and_change_nothing(trained: nn.Module, call: Any) -> None:
    codes = trained[0].weight.codes.clone()
    with pytest.raises(NotImplementedError, match=r"aten.*must be read as weight.dequantize.*foreach=False"):
        call(trained[0].weight)
    assert torch.equal(trained[0].weight.codes, codes)


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_fused_steps_of_torch_are_refused(trained: nn.Module, option: str) -> None:
    optimizer = torch.optim.AdamW([trained[0].weight], **{option: True})
    trained[0](torch.randn(3, 100)).sum().backward()
    codes = trained[0].weight.codes.clone()
    with pytest.raises(NotImplementedError, match="foreach=False and fused=False to the optimizer"):
        optimizer.step()
    if option == "fused":
        assert torch.equal(trained[0].weight.codes, codes)


def test_layers_that_share_a_weight_share_the_codes(model: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False))
    model[1].weight = model[0].weight
    report = lowbit.quantize_(model, PREPARE)
    assert model[0].weight is model[1].weight and [row.bytes_after for row in report.rows] == [480, 0]
    lowbit.quantize_(model, CONVERT)
    assert model[0].weight is model[1].weight
    tied = nn.Sequential(nn.Embedding(20, 10), nn.Linear(10, 20, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(
        ValueError, match="weight of 1 must not be shared with a layer that stays float, got one untied"
    ):
        lowbit.quantize_(tied, PREPARE)
    assert type(tied[1]) is nn.Linear


def test_other_dtypes_of_the_model_keep_codes_and_scales(trained: nn.Module) -> None:
    codes, scale = trained[0].weight.codes.clone(), trained[0].weight.scale.clone()
    trained.bfloat16()
    weight = trained[0].weight
    assert weight.dtype is torch.bfloat16 and weight.scale.dtype is torch.float32 and isinstance(weight, nn.Parameter)
    assert torch.equal(weight.codes, codes) and torch.equal(weight.scale, scale)
    assert trained(torch.randn(3, 100).bfloat16()).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="x must be torch.bfloat16, as weight is, got torch.float32"):
        trained(torch.randn(3, 100))


def test_bad_arguments_are_refused_by_name(model: nn.Module, trained: nn.Module) -> None:
    with pytest.raises(ValueError, match="Config: step must be 'prepare' or 'convert', got step='train'"):
        Int8WeightOnlyQuantizedTrainingConfig(step="train")
    with pytest.raises(ValueError, match=r"head must be left out with .*\(step='prepare'\), got int8_weight_only"):
        lowbit.quantize_(model, PREPARE, head=lowbit.int8_weight_only())
    with pytest.raises(ValueError, match="0 is being trained as an int8 weight; .*or end it with .*step=.convert"):
        lowbit.quantize_(trained, lowbit.int8_weight_only())
    with pytest.raises(TypeError, match=r"Int8WeightLinear: quantize_\(model, Int8WeightOnlyQuantized"):
        Int8WeightLinear(4, 4)
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(33, 100)
    with pytest.raises(TypeError, match="weight of 1 must be of an nn.Linear, got a Conv1D"):
        lowbit.quantize_(nn.Sequential(nn.Linear(4, 4), conv), PREPARE)
