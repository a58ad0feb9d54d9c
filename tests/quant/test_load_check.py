# SPDX-License-Identifier: Apache-2.0
"""State dicts of quantized models: they travel as plain tensors, and a wrong one is refused before anything is copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowbit
from lowbit.formats.spec import LAYOUT_VERSION
from lowbit.quant import QuantLinear, quantize_


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def quantized(config, model):
    quantize_(model, config)
    return model


@pytest.fixture
def other(config, model):
    """The same model with other weights, quantized the same way; made before ``model`` is quantized."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.normal_()
    quantize_(other, config)
    return other


def test_a_state_dict_holds_plain_tensors_and_loads_with_weights_only(other, quantized, x):
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    assert other.load_state_dict(loaded).missing_keys == []
    assert same(other, quantized) and torch.equal(other(x), quantized(x))


def test_safetensors_round_trip(other, quantized, x, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(quantized.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), quantized(x))


def test_safetensors_keeps_tied_weights_tied(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[1].weight = model[0].weight
    quantize_(model, lowbit.int8_weight_only())
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    copied[0].weight.data.zero_()
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(copied, str(tmp_path / "model.safetensors"))
    assert same(copied, model) and copied[0].weight is copied[1].weight


def test_a_meta_model_takes_the_state_dict_by_assignment(config, quantized, x):
    with torch.device("meta"):
        skeleton = nn.Sequential(
            nn.Linear(100, 33), nn.ReLU(), nn.Sequential(nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 9))
        )
    quantize_(skeleton, config)
    state = quantized.state_dict()
    skeleton.load_state_dict(state, assign=True)
    assert torch.equal(skeleton(x), quantized(x))
    assert skeleton[0].weight.data_ptr() == state["0.weight"].data_ptr() and not skeleton[0].weight.requires_grad
    assert isinstance(skeleton[0].weight, nn.Parameter) and same(skeleton, quantized)


def test_a_sub_module_loads_its_part(other, quantized):
    other[2].load_state_dict(quantized[2].state_dict())
    assert same(other[2], quantized[2]) and not same(other[0], quantized[0])
    other[0].load_state_dict(quantized[0].state_dict())
    assert same(other, quantized)


def layout(at: int, number: int) -> Callable[[dict], dict]:
    """The layout with another number there."""
    return lambda state: {"2.2.layout": state["2.2.layout"].index_fill(0, torch.tensor(at), number)}


WANTED = r"load_state_dict: 2\.2\.weight must be packed as {name} of n=9 k=65"
LAYOUT_OF_9 = torch.tensor(lowbit.formats.LinearSpec("int8", 64).layout(9, 65))
WRONG = {
    "float": (lambda state: {"2.2.weight": torch.zeros(9, 65)}, r", got float32 \[9, 65\]"),
    "version": (layout(0, LAYOUT_VERSION + 1), rf", got layout version {LAYOUT_VERSION + 1}, known are 1 to {LAYOUT_VERSION}"),
    "layout": (layout(-1, 9), r", got layout 9, known are 0 x86-panel-16x64, 1 row-major"),
    "size": (lambda state: {"2.2.layout": LAYOUT_OF_9}, r", got int8 g64 of n=9 k=65"),
    "no layout": (lambda state: {"2.2.layout": None}, r", got uint8 .* without 2\.2\.layout"),
    "shape": (lambda state: {"2.2.weight": torch.zeros(3, 64, dtype=torch.uint8)}, r": shape .*, got uint8 \[3, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "got"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_state_dict_names_module_wanted_and_got_and_leaves_the_model_as_it_was(
    config, other, quantized, change, got, assign, strict
):
    before = copy.deepcopy(quantized)
    with pytest.raises(ValueError, match=WANTED.format(name=quantized[2][2].spec.name) + got):
        state = other.state_dict()
        state = {key: value for key, value in (state | change(state)).items() if value is not None}
        quantized.load_state_dict(state, assign=assign, strict=strict)
    assert same(quantized, before)


def test_a_state_dict_of_another_format_is_refused_with_all_layers_counted(model):
    sources = [copy.deepcopy(model) for _ in range(2)]
    quantize_(sources[0], lowbit.int4_weight_only(32))
    quantize_(sources[1], lowbit.int8_dynamic_activation_int4_weight(32))
    before = copy.deepcopy(sources[0])
    with pytest.raises(
        ValueError, match="0.weight must be packed as int4 g32 of n=33 k=100, got int4 g32 int8-activations of n=33"
    ):
        sources[0].load_state_dict(sources[1].state_dict())
    assert same(sources[0], before)


def test_a_float_checkpoint_into_a_quantized_model_is_refused_also_for_a_sub_module_and_a_single_layer(model, subtests):
    plain = copy.deepcopy(model)
    quantize_(model, lowbit.int8_weight_only())
    before = copy.deepcopy(model)
    for target, source in ((model, plain), (model[2], plain[2]), (model[0], plain[0])):
        with subtests.test(type(target).__name__), pytest.raises(ValueError, match=r"weight must be packed as int8 per-channel .*, got float32"):
            target.load_state_dict(source.state_dict())
    assert same(model, before)


def test_the_check_travels_with_copies_and_is_registered_once(model):
    plain = model.state_dict()
    plain = {key: value.clone() for key, value in plain.items()}
    quantize_(model, lowbit.int8_weight_only(), lambda m, name: name == "0")
    quantize_(model, lowbit.int8_weight_only(), lambda m, name: name == "2.2")
    assert len(model._load_state_dict_pre_hooks) == 1
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = copy.deepcopy(copied)
        with pytest.raises(ValueError, match="0.weight must be packed"):
            copied.load_state_dict(plain)
        assert same(copied, before)


def test_missing_keys_follow_torchs_rules(quantized):
    state = {key: value for key, value in quantized.state_dict().items() if not key.startswith("2.2.")}
    assert quantized.load_state_dict(state, strict=False).missing_keys == ["2.2.weight", "2.2.bias", "2.2.layout"]
    with pytest.raises(RuntimeError, match="Missing key"):
        quantized.load_state_dict(state)


def test_a_quantized_state_dict_does_not_load_into_a_float_model(quantized):
    with pytest.raises(RuntimeError, match="size mismatch|Unexpected key"):
        nn.Linear(100, 33).load_state_dict(quantized[0].state_dict())


def test_no_weight_is_stored_twice(quantized):
    storages = [tensor.untyped_storage() for tensor in quantized.state_dict().values()]
    held = sum(storage.nbytes() for storage in storages)
    weights = sum(m.weight.nbytes for m in quantized.modules() if isinstance(m, QuantLinear))
    assert held <= weights + 4 * (33 + 9) + 3 * 8 * 8
