# SPDX-License-Identifier: Apache-2.0
"""Experts of mixtures in training: results and gradients beside float64 and beside the linear layers of each kind, what
becomes of them afterwards, and what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantExperts
from lowbit.quant.kinds import weights_of
from lowbit.training import (
    BitNetTrainingConfig,
    FakeQuantizedExperts,
    Float8Experts,
    Float8LinearConfig,
    Int8MixedPrecisionExperts,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyQuantizedTrainingConfig,
    QATConfig,
    convert_to_float8_training,
    end_float8_training,
)

sys.path.append(str(Path(__file__).parents[1] / "quant"))
from expert_modules import CLASSES, HIDDEN, PICKED, TOKENS, E, Experts, InTurns, made, routed  # noqa: E402

INT8 = lowbit.int8_weight_only(32, mapping_type=lowbit.MappingType.SYMMETRIC_NO_CLIPPING_ERR)
"""No weight is clipped, so that the gradient of each is that of its rounded value."""
INT4 = lowbit.int8_dynamic_activation_int4_weight(group_size=32)
KINDS: dict[str, tuple[type, Callable[[nn.Module], Any], Callable[[nn.Module], Any], float]] = {
    "fake-quantized": (
        FakeQuantizedExperts,
        lambda model: lowbit.quantize_(model, QATConfig(INT8)),
        lambda model: lowbit.quantize_(model, QATConfig(None, step="convert")),
        0.02,
    ),
    "int8": (
        Int8MixedPrecisionExperts,
        lambda model: lowbit.quantize_(model, Int8MixedPrecisionTrainingConfig()),
        lambda model: lowbit.quantize_(model, Int8MixedPrecisionTrainingConfig(False, False, False)),
        0.05,
    ),
    "float8": (
        Float8Experts,
        lambda model: convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise")),
        end_float8_training,
        0.15,
    ),
}
"""The class, how it begins and ends, and how far results and gradients are off float64: what rounding both operands
of each product costs, relative to the norm."""


def step(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The result of a call in which an expert has no rows and a pair has no expert, and its gradients by name."""
    x, index, weights = routed()
    index[4, 0] = E
    x, weights = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
    module.zero_grad()
    y = module(x, index, weights)
    y.backward(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype))
    found = {"y": y.detach(), "x": x.grad, "router": weights.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor], most: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        error = float((value.double() - wanted[name].double()).norm() / wanted[name].double().norm())
        assert error < most, f"{name} is off by {error:.2g}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", CLASSES)
def test_results_and_gradients_are_those_of_float64(kind: str, cls: type[Experts]) -> None:
    trained, prepare, _, most = KINDS[kind]
    experts = made(cls, bias=True)
    wanted = step(copy.deepcopy(experts).double(), torch.float64)
    prepare(experts)
    assert type(experts) is trained
    got = step(experts)
    assert_near(got, wanted, most)
    for weight in weights_of(experts):
        assert not got[weight.key][E - 1].any() and got[weight.key][0].any()


@pytest.mark.parametrize("cls", CLASSES)
def test_fake_quantized_experts_are_float_ones_with_rounded_weights(cls: type[Experts]) -> None:
    """To the rounding of sums."""
    experts = made(cls, bias=True)
    exact = copy.deepcopy(experts)
    lowbit.quantize_(exact, INT8)
    lowbit.dequantize_(exact)
    wanted = step(exact.double(), torch.float64)
    report = lowbit.quantize_(experts, QATConfig(INT8))
    assert [row.layer for row in report.rows] == [f".{weight.key}" for weight in weights_of(experts)]
    assert_near(step(experts), wanted, 1e-5)


@pytest.mark.parametrize("flags", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_each_expert_multiplies_as_a_linear_layer_of_its_kind(flags: tuple[bool, bool, bool], subtests: Any) -> None:
    """Bit for bit: one expert alone with one pair a token is two linear layers."""
    torch.manual_seed(0)
    x, grad = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    index, shares = torch.full((TOKENS, 1), 2), torch.ones(TOKENS, 1)
    preparations = {
        "int8": lambda model: lowbit.quantize_(model, Int8MixedPrecisionTrainingConfig(*flags)),
        "float8": lambda model: convert_to_float8_training(model),
        "fake-quantized": lambda model: lowbit.quantize_(model, QATConfig(INT4)),
    }
    for name, prepare in preparations.items():
        experts = made()
        first, down = experts.gate_up_proj[2].detach(), experts.down_proj[2].detach()
        layers = nn.ModuleList(nn.Linear(*value.shape[::-1], bias=False) for value in (first, down))
        for layer, value in zip(layers, (first, down), strict=True):
            layer.weight.data = value.clone()
        prepare(experts)
        prepare(layers)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = experts(mine, index, shares)
        gate, up = layers[0](theirs).chunk(2, -1)
        wanted = layers[1](nn.functional.silu(gate) * up)
        y.backward(grad)
        wanted.backward(grad)
        with subtests.test(kind=name):
            assert torch.equal(y, wanted) and torch.equal(mine.grad, theirs.grad)
            for got, layer in zip((experts.gate_up_proj, experts.down_proj), layers, strict=True):
                assert torch.equal(got.grad[2], layer.weight.grad) and not got.grad[:2].any()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("config", [INT4, lowbit.int4_weight_only(32), lowbit.nf4_weight_only()], ids=str)
def test_what_is_converted_has_the_weights_that_were_trained(cls: type[Experts], config: Any) -> None:
    experts = made(cls, bias=True)
    lowbit.quantize_(experts, QATConfig(config))
    optimizer = torch.optim.SGD(experts.parameters(), lr=1e-2)
    step(experts)
    optimizer.step()
    last = {
        weight.key: torch.stack([
            torch.ops.lowbit.fake_quantize(part.contiguous(), *experts.weight_format, None, None)[0]
            for part in weight.matrix(experts._parameters[weight.key].detach())
        ])
        for weight in weights_of(experts)
    }  # fmt: skip
    x, index, weights = routed()
    trained = experts(x, index, weights).detach()
    report = lowbit.quantize_(experts, QATConfig(config, step="convert"))
    assert type(experts) is QuantExperts and len(report.quantized) == 2
    for key, wanted in last.items():
        assert torch.equal(experts.dequantize(key), wanted)
    assert (experts(x, index, weights) - trained).norm() < 1e-2 * trained.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_names_stay_and_the_float_module_comes_back(kind: str) -> None:
    trained, prepare, end, _ = KINDS[kind]
    experts = made(InTurns, bias=True)
    experts.config = "as modules of transformers have"
    held, before = dict(experts.named_parameters()), dict(vars(experts))
    prepare(experts)
    assert all(value is held[name] for name, value in experts.named_parameters())
    assert experts.state_dict().keys() == held.keys() and experts.config == before["config"]
    x, index, weights = routed()
    y = experts(x, index, weights)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(twin) is trained and torch.equal(twin(x, index, weights), y)
    assert trained.__name__ in repr(experts) and "5 experts" in repr(experts)
    with pytest.raises(ValueError, match="is being trained as"):
        lowbit.quantize_(experts, lowbit.int8_weight_only(), lambda module, _: True)
    end(experts)
    assert type(experts) is InTurns and vars(experts).keys() == before.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_autocast_and_a_frozen_weight(kind: str) -> None:
    experts = made(bias=True)
    KINDS[kind][1](experts)
    x, index, weights = routed()
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype == torch.float32 and (y - experts(x, index, weights)).norm() < 0.1 * y.norm()
    experts.down_proj.requires_grad_(False)
    experts(x, index, weights).sum().backward()
    assert experts.down_proj.grad is None and experts.gate_up_proj.grad.any()


def test_bad_input_is_refused_by_name() -> None:
    experts = made()
    lowbit.quantize_(experts, QATConfig(INT4))
    x, index, weights = routed()
    for change, error, text in (
        ({"hidden_states": x[None]}, ValueError, r"hidden_states must have shape \[T, H\]"),
        ({"hidden_states": x.bfloat16()}, TypeError, "hidden_states must be torch.float32, as the weights are, got torch.bfloat16"),
        ({"top_k_index": index[:, 1:]}, ValueError, r"top_k_weights must have shape \[23, 2\], got \[23, 3\]"),
        ({"top_k_index": index + 3}, ValueError, "top_k_index must be 0 to 5, got 6"),
        ({"top_k_index": index - 1}, ValueError, "top_k_index must be 0 to 5, got -1"),
        ({"top_k_weights": weights.long()}, TypeError, "top_k_weights must be floats, got int64"),
    ):  # fmt: skip
        given = {"hidden_states": x, "top_k_index": index, "top_k_weights": weights} | change
        with pytest.raises(error, match=f"FakeQuantizedExperts: {text}"):
            experts(**given)
    with pytest.raises(TypeError, match="FakeQuantizedExperts: made of a float module of experts"):
        FakeQuantizedExperts()
    assert index.shape == (TOKENS, PICKED)


@pytest.mark.parametrize(("config", "what"), [
    (BitNetTrainingConfig(), "ternary training"),
    (Int8WeightOnlyQuantizedTrainingConfig(), "training of int8 weights"),
    (QATConfig(INT4, learned_scales=True), "training of scales"),
], ids=str)  # fmt: skip
def test_what_leaves_experts_float_says_so(config: Any, what: str) -> None:
    model = nn.ModuleDict({"router": nn.Linear(64, 16, bias=False), "experts": made()})
    report = lowbit.quantize_(model, config)
    assert type(model["experts"]) is Experts
    assert f"experts of 1 layers stay float: {what} is for linear layers" in report.notes
    assert not [note for note in lowbit.quantize_(nn.Linear(64, 16, bias=False), config).notes if "experts" in note]
