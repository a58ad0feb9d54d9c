# SPDX-License-Identifier: Apache-2.0
"""A kind of layer is added in one file: here experts of two weights [E, k, n], gate and values in turns, as gpt-oss has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.formats.spec import StoredWeight
from lowbit.quant import kinds
from lowbit.quant.kinds import Kind, LayerWeight, features_of, is_packed, kind_of, layout_name, weight_name, weights_of
from lowbit.quant.layout import PackedModule, numbers_of
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.quant_linear import LINEAR

E, HIDDEN, INNER = 3, 64, 32
CONFIG = lowbit.int4_weight_only(group_size=32)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, HIDDEN, 2 * INNER))
        self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * INNER))
        self.down = nn.Parameter(torch.randn(E, INNER, HIDDEN))


class PackedExperts(PackedModule, Experts):
    pass


class ExpertsKind(Kind):
    name, float_name, packed_class = "experts", "Experts", PackedExperts

    def has(self, cls: type[nn.Module]) -> bool:
        return issubclass(cls, Experts)

    def weights(self, module: Any) -> tuple[LayerWeight, ...]:
        turned = torch.arange(INNER).flip(0)
        return (
            LayerWeight("gate_up", 2 * INNER, HIDDEN, "gate_up_bias", E, transposed=True, interleaved=True),
            LayerWeight("down", HIDDEN, INNER, None, E, transposed=True, permutation=turned),
        )

    def kernel(self, module: nn.Module, weight: LayerWeight, spec: Any, like: Tensor) -> str:
        return LINEAR.kernel(module, weight, spec, like)

    def hold(self, module: Any, key: str, packed: nn.Parameter, stored: StoredWeight, dtype: Any = None) -> None:
        module.__class__ = PackedExperts
        module._parameters[key], module.spec = packed, stored.spec
        module.register_buffer(layout_name(key), torch.tensor(stored.numbers, device=packed.device))

    def dequantize(self, module: Any, weight: LayerWeight, dtype: torch.dtype) -> Tensor:
        args = module.spec.weight_args(weight.n, weight.k)
        matrices = [torch.ops.lowbit.dequantize(packed, *args) for packed in module._parameters[weight.key]]
        return weight.value(torch.stack(matrices)).to(dtype)

    def give_back(self, module: Any, weights: dict[str, nn.Parameter]) -> None:
        module.__class__ = Experts
        module._parameters |= weights
        for key in weights:
            del module._buffers[layout_name(key)]
        del module.spec


@pytest.fixture(autouse=True)
def experts_kind() -> Iterator[Kind]:
    kind = kinds.register(ExpertsKind())
    yield kind
    kinds.KINDS.remove(kind)
    kinds._kind_of.cache_clear()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Experts())


def same(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


def test_each_weight_is_packed_and_has_a_line_of_the_report(model: nn.Module) -> None:
    float_experts = copy.deepcopy(model[1])
    report = lowbit.quantize_(model, CONFIG)
    assert type(model[1]) is PackedExperts and is_packed(model[1])
    assert [row.layer for row in report.rows] == ["0", "1.gate_up", "1.down"] and not report.left
    assert [row.shape for row in report.rows] == [(64, 64), (E, 64, 64), (E, 64, 32)]
    assert all(row.bytes_after == weight.nbytes for row, weight in zip(report.rows[1:], (model[1].gate_up, model[1].down), strict=True))
    assert all(20 < row.error_db < 30 and row.kernel for row in report.rows) and "3x64x64" in str(report)
    gate_up = float_experts.gate_up.mT
    matrix = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
    for number in range(E):
        spec = CONFIG.spec(torch.float32)
        assert torch.equal(model[1].gate_up[number], pack_weight(matrix[number], spec)[0])
        assert torch.equal(model[1].down[number], pack_weight(float_experts.down[number].T.flip(1), spec)[0])
    assert torch.equal(model[1].gate_up_bias, float_experts.gate_up_bias)


def test_the_float_layer_comes_back_with_the_decoded_weights(model: nn.Module) -> None:
    before = copy.deepcopy(model)
    lowbit.quantize_(model, CONFIG)
    assert lowbit.dequantize_(model) == ["0", "1"] and type(model[1]) is Experts
    assert model.state_dict().keys() == before.state_dict().keys()
    for key in ("gate_up", "down"):
        value, exact = getattr(model[1], key), getattr(before[1], key)
        assert value.shape == exact.shape and 0 < (value - exact).abs().max() < 0.5


@pytest.mark.parametrize("layout", ["x86-panel-16x64", "row-major"])
def test_the_state_dict_says_how_many_there_are_and_loads_in_every_layout(model: nn.Module, layout: str) -> None:
    empty, skeleton = copy.deepcopy(model), copy.deepcopy(model)
    lowbit.quantize_(model, CONFIG)
    state = model.state_dict()
    assert state["1.down_layout"].tolist() == [3, *state["0.layout"].tolist()[1:2], HIDDEN, INNER, *state["0.layout"].tolist()[4:], E]
    state = lowbit.quant.repack(state, layout)
    assert numbers_of(state["1.gate_up_layout"]).layout == layout
    assert lowbit.load(empty, state) == ["0", "1"] and same(empty, model)
    lowbit.quantize_(skeleton, CONFIG)
    skeleton.load_state_dict(state)
    assert same(skeleton, model)


def test_others_are_refused_by_name(model: nn.Module) -> None:
    packed = copy.deepcopy(model)
    lowbit.quantize_(packed, CONFIG)
    state = packed.state_dict()
    state["1.down_layout"] = state["1.down_layout"].index_fill(0, torch.tensor(-1), E + 1)
    with pytest.raises(ValueError, match=r"load_state_dict: 1\.down must be packed as int4 g32 of 3 matrices of n=64 k=32, got .* 4 matrices"):
        packed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"load: 1\.down must be a packed weight of 3 matrices of n=64 k=32 with its layout"):
        lowbit.load(model, state)
    with pytest.raises(ValueError, match="quantize_: 1 is already quantized as int4 g32"):
        lowbit.quantize_(packed, CONFIG, lambda module, name: name == "1")
    with pytest.raises(ValueError, match="quantize_: down of 1 must be finite"):
        model[1].down.data[0, 0, 0] = torch.inf
        lowbit.quantize_(model, CONFIG)
    assert type(model[1]) is Experts


def test_training_and_sparsity_are_of_other_kinds(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="must select nn.Linear, nn.Embedding and experts layers only, got 1: Experts"):
        lowbit.quantize_(model, lowbit.training.QATConfig(CONFIG), lambda module, name: name == "1")
    report = lowbit.sparsify_(model, lowbit.block_sparse_weight(16))
    assert [row.layer for row in report.rows] == ["0"] and type(model[1]) is Experts


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("permutation", [None, torch.tensor([2, 0, 4, 1, 3])])
def test_value_is_the_inverse_of_matrix(transposed: bool, interleaved: bool, experts: int | None, permutation: Tensor | None) -> None:
    weight = LayerWeight("w", 6, 5, None, experts, transposed, interleaved, permutation)
    value = torch.randn(weight.float_shape)
    matrix = weight.matrix(value)
    assert matrix.shape == weight.shape and torch.equal(weight.value(matrix), value)


def test_kinds_of_layers_that_are_there() -> None:
    assert kind_of(nn.Linear(3, 2)) is LINEAR and kind_of(nn.Embedding(3, 2)) is EMBEDDING and kind_of(nn.ReLU()) is None
    assert features_of(nn.Linear(3, 2)) == (2, 3) and features_of(nn.Embedding(3, 2)) == (3, 2)
    assert weights_of(nn.Linear(3, 2)) == (LayerWeight("weight", 2, 3, "bias"),) and weights_of(nn.ReLU()) == ()


@pytest.mark.parametrize(("weight", "layout"), [("weight", "layout"), ("a.weight", "a.layout"), ("a.down", "a.down_layout")])
def test_names_of_a_weight_and_its_numbers(weight: str, layout: str) -> None:
    assert layout_name(weight) == layout and weight_name(layout) == weight and weight_name(weight) is None


FILES_PASSED = """
import os, sys
import torch, lowbit

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

config, passed, measured = lowbit.int8_dynamic_activation_int4_weight(group_size=32), set(), model()
lowbit.quantize_(model(), config)
sys.setprofile(lambda frame, event, _: passed.add(frame.f_code.co_filename))
lowbit.quantize_(measured, config)
sys.setprofile(None)
home = os.path.dirname(lowbit.__file__)
print(*sorted(os.path.relpath(name, home) for name in passed if name.startswith(home)))
"""


def test_quantize_passes_through_few_files(python: Callable[..., str]) -> None:
    """A file that joins them makes the path longer for a reader. Where transformers was imported, two more are passed."""
    passed = python(FILES_PASSED).split()
    assert {"quant/quantize.py", "quant/select.py", "quant/packing.py"} <= {*passed} and len(passed) <= 13, passed
