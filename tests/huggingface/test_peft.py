# SPDX-License-Identifier: Apache-2.0
"""peft on quantized layers: LoRA and DoRA train, merge and unmerge; adapters stay float when quantizing comes after peft."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowbit

peft = pytest.importorskip("peft")

CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(),
    "asymmetric": lowbit.int4_weight_only(32, mapping_type=lowbit.MappingType.ASYMMETRIC),
    "float": lowbit.float_weight(),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))


def lora(**changes: object) -> object:
    return peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False, **changes)


def adapted(config: object, **changes: object) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Model().eval()
    lowbit.quantize_(model, config)
    return peft.get_peft_model(model, lora(**changes)).eval(), torch.randn(5, 64)


def packed(model: nn.Module) -> list[torch.Tensor]:
    return [module.weight.clone() for module in model.modules() if isinstance(module, lowbit.QuantLinear)]


def close(y: torch.Tensor, wanted: torch.Tensor, config: str) -> bool:
    return bool((y - wanted).norm() < (0.02 if config in ("int8", "float") else 0.25) * wanted.norm())


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize("name", CONFIGS)
def test_merging_adds_to_the_weight_and_unmerging_brings_back_the_same_bytes(name, variant):
    model, x = adapted(CONFIGS[name], **variant)
    before, wanted = packed(model), model(x)
    model.merge_adapter()
    merged = packed(model)
    assert any(not torch.equal(*pair) for pair in zip(before, merged, strict=True))
    assert close(model(x), wanted, name)
    model.unmerge_adapter()
    assert all(torch.equal(*pair) for pair in zip(before, packed(model), strict=True))
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("variant", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_merge_and_unload_leaves_quantized_layers(name, variant, safe):
    model, x = adapted(CONFIGS[name], **variant)
    wanted = model(x)
    plain = model.merge_and_unload(safe_merge=safe)
    assert type(plain) is Model and type(plain.up) is lowbit.QuantLinear
    assert close(plain(x), wanted, name)
    assert type(model.base_model.model.head) is lowbit.QuantLinear


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_only_adapters_train_and_the_loss_falls(variant):
    model, x = adapted(CONFIGS["w4a8"], **variant)
    model.train()
    before, target = packed(model), torch.randn(5, 10)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(*pair) for pair in zip(before, packed(model), strict=True))


def test_two_adapters_merge_in_turn_and_unmerge_to_the_same_bytes():
    model, x = adapted(CONFIGS["int8"])
    model.add_adapter("second", lora())
    before = packed(model)
    model.base_model.set_adapter(["default", "second"])
    model.eval()
    wanted = model(x)
    model.merge_adapter(["default"])
    model.merge_adapter(["default", "second"])
    assert close(model(x), wanted, "int8")
    model.unmerge_adapter()
    assert all(torch.equal(*pair) for pair in zip(before, packed(model), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_that_is_loaded_while_an_adapter_is_merged_counts_as_merged(name, assign):
    """As in peft's float layers: unmerging takes the adapter off the weight that is there."""
    model, x = adapted(CONFIGS[name])
    up = model.base_model.model.up
    with torch.no_grad():
        delta = up.get_delta_weight("default").clone()
    model.merge_adapter()
    loaded = nn.Linear(64, 96)
    up.base_layer.load_state_dict(lowbit.QuantLinear.from_linear(loaded, up.base_layer.spec).state_dict(), assign=assign)
    wanted = loaded.weight - delta
    model.unmerge_adapter()
    error = (up.base_layer.dequantize() - wanted).norm() / wanted.norm()
    assert error < (0.02 if name in ("int8", "float") else 0.25)


def test_a_weight_that_is_loaded_between_two_merges_is_what_unmerging_leaves():
    model, _ = adapted(CONFIGS["float"])
    model.add_adapter("second", lora())
    up = model.base_model.model.up
    up.merge(adapter_names=["default"])
    loaded = nn.Linear(64, 96)
    up.base_layer.load_state_dict(lowbit.QuantLinear.from_linear(loaded, up.base_layer.spec).state_dict())
    up.merge(adapter_names=["second"])
    up.unmerge()
    with torch.no_grad():
        torch.testing.assert_close(up.base_layer.dequantize(), loaded.weight - up.get_delta_weight("default"))


@pytest.mark.parametrize("safe", [False, True])
def test_a_broken_adapter_is_refused_and_nothing_changes(safe):
    model, _ = adapted(CONFIGS["int8"], lora_bias=False)
    before = packed(model)
    with torch.no_grad():
        model.base_model.model.up.lora_A["default"].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected|must be finite"):
        model.base_model.model.up.merge(safe_merge=safe)
    assert all(torch.equal(*pair) for pair in zip(before, packed(model), strict=True))
    assert not model.base_model.model.up.merged


def test_shared_packed_weights_are_not_written_through():
    """Merging one of two layers that share a weight must not change the other."""
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "other": nn.Linear(32, 32)})
    model["other"].weight = model["up"].weight
    lowbit.quantize_(model, CONFIGS["int8"])
    layer = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False), model)
    other = layer["other"].weight.clone()
    layer["up"].merge()
    assert torch.equal(layer["other"].weight, other)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_merge_too(copied: Callable[[nn.Module], nn.Module]):
    model, x = adapted(CONFIGS["int8"])
    wanted = model(x)
    other = copied(model)
    other.merge_adapter()
    assert close(other(x), wanted, "int8") and not model.base_model.model.up.merged
    other = copied(other)
    other.unmerge_adapter()
    assert all(torch.equal(*pair) for pair in zip(packed(model), packed(other), strict=True))


def test_a_model_quantized_after_peft_came_keeps_its_adapters_float_and_merges():
    torch.manual_seed(0)
    model = peft.get_peft_model(Model().eval(), lora(modules_to_save=["head"])).eval()
    x = torch.randn(5, 64)
    wanted = model(x)
    for filter_fn in (
        lambda module, name: isinstance(module, nn.Linear) and "up" in name,
        lambda module, name: type(module) is nn.Linear,
    ):
        report = lowbit.quantize_(model, CONFIGS["int8"], filter_fn)
    notes = {row.layer: row.note for row in report.skipped}
    assert notes["base_model.model.up.lora_A.default"] == "an adapter of peft, which is trained"
    assert notes["base_model.model.head.modules_to_save.default"] == "an adapter of peft, which is trained"
    up = model.base_model.model.up
    assert type(up.base_layer) is lowbit.QuantLinear and type(up.lora_A["default"]) is nn.Linear
    assert up.lora_A["default"].weight.requires_grad
    assert close(model(x), wanted, "int8")
    model.merge_adapter()
    assert close(model(x), wanted, "int8")
    model.unmerge_adapter()
    lowbit.dequantize_(model)
    assert type(up.base_layer) is nn.Linear
    model.merge_adapter()
    assert close(model(x), wanted, "int8")


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("first", ["quantize_", "peft"])
def test_adapters_of_a_conv1d_know_how_its_weight_lies(first, variant):
    """That of a Conv1D is [k, n], its packed one [n, k], and dequantize_ makes it [k, n] again."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.ModuleDict({"wide": conv1d(96, 64), "square": conv1d(64, 64)}).eval()
    inputs = {name: torch.randn(5, 64) for name in model}
    if first == "quantize_":
        lowbit.quantize_(model, CONFIGS["int8"])
    settings = peft.LoraConfig(r=4, target_modules=["wide", "square"], init_lora_weights=False, **variant)
    model = peft.inject_adapter_in_model(settings, model).eval()
    if first == "peft":
        lowbit.quantize_(model, CONFIGS["int8"])
    wanted = {name: model[name](x) for name, x in inputs.items()}
    for layer in model.values():
        layer.merge()
    assert all(close(model[name](x), wanted[name], "int8") for name, x in inputs.items())
    for layer in model.values():
        layer.unmerge()
    lowbit.dequantize_(model)
    for name, x in inputs.items():
        assert type(model[name].base_layer) is conv1d
        torch.testing.assert_close(model[name](x), wanted[name], rtol=1e-4, atol=1e-4)
        model[name].merge()
        torch.testing.assert_close(model[name](x), wanted[name], rtol=1e-4, atol=1e-4)


def test_the_adapter_saves_and_loads_alone(tmp_path):
    model, x = adapted(CONFIGS["w4a8"])
    wanted = model(x)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = Model().eval()
    lowbit.quantize_(base, CONFIGS["w4a8"])
    assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path).eval()(x), wanted)


@pytest.mark.parametrize("first", ["peft", "lowbit.quant"])
def test_the_order_of_imports_does_not_matter(python, first):
    second = {"peft": "lowbit.quant", "lowbit.quant": "peft"}[first]
    code = f"""
import torch
import {first}, {second}
import lowbit, peft, sys
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
lowbit.quantize_(model, lowbit.int8_weight_only())
model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
model.merge_adapter()
hooks = [finder for finder in sys.meta_path if getattr(finder, "package", "").startswith("peft")]
print(type(model.base_model.model[0]).__name__, hooks, lowbit.peers.when_imported.failures)
"""
    assert python(code).strip() == "QuantLoraLinear [] {}"
