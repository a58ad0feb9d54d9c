# SPDX-License-Identifier: Apache-2.0
"""Merging adapters of each method of peft into packed layers: the change is kept, undone bit for bit, all or nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantLinear

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft_methods import (  # noqa: E402
    IDS,
    adapted,
    agree,
    bases,
    config_of,
    decoded,
    numbers,
    packed,
    results,
)

from lowbit.huggingface.peft import SERVED  # noqa: E402

NO_MERGE = {"LILY", "POLY", "XLORA"}
"""Methods that peft does not merge."""
NO_UNMERGE = {"OSF"}
MERGED = sorted(SERVED - NO_MERGE)


def of(name: str, **options: Any) -> Any:
    return adapted(packed(), config_of(name, **options))


def kept(before: Tensor, wanted: Tensor, after: Tensor) -> float:
    """The share of a change that a packed weight has kept; 1 where there is none."""
    change = (wanted - before).double()
    return float((((after - before) * change).sum() / change.square().sum()).nan_to_num(1.0))


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in got)


@pytest.mark.parametrize("safe", [False, True], ids=["unsafe", "safe"])
@pytest.mark.parametrize("name", MERGED)
def test_merging_keeps_the_change_and_unmerging_brings_back_the_same_bytes(name: str, safe: bool) -> None:
    model, floats = of(name), adapted(decoded(), config_of(name))
    before, logits = numbers(model), results(model)["logits"]
    model.merge_adapter(safe_merge=safe)
    floats.merge_adapter(safe_merge=safe)
    wanted = bases(floats)
    assert not same(numbers(model), before)
    for layer, base in bases(model).items():
        old = before[f"{layer} weight"]
        assert torch.equal(base.weight, old) == (name == "BEFT")  # which has a bias only
        was = QuantLinear.from_packed(old, *wanted[layer].weight.shape, base.spec).dequantize()
        assert kept(was, wanted[layer].weight, base.dequantize()) >= 0.8
        torch.testing.assert_close(base.bias, wanted[layer].bias)
    with torch.no_grad():
        assert (model(IDS).logits - logits).norm() < 0.05 * logits.norm()
    if name in NO_UNMERGE:
        with pytest.raises(NotImplementedError, match="do not support unmerging"):
            model.unmerge_adapter()
        return
    model.unmerge_adapter()
    assert same(numbers(model), before)
    assert torch.equal(results(model)["logits"], logits)


@pytest.mark.parametrize("name", MERGED)
def test_merge_and_unload_leaves_the_packed_layers_of_a_merged_model(name: str) -> None:
    model = of(name)
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    wanted = numbers(merged)
    plain = model.merge_and_unload()
    assert not any(
        "peft" in type(module).__module__ or "adapter" in type(module).__module__ for module in plain.modules()
    )
    for entry, value in wanted.items():
        layer, key = entry.removeprefix("base_model.model.").split(" ")
        assert torch.equal(plain.get_parameter(f"{layer}.{key}"), value)
        assert type(plain.get_submodule(layer)) is lowbit.QuantLinear
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, merged(IDS).logits)


@pytest.mark.parametrize("name", sorted(SERVED - {"XLORA"}))
def test_an_adapter_is_saved_and_loaded_on_packed_and_on_float_models(name: str, tmp_path: Path) -> None:
    model = of(name)
    model.save_pretrained(tmp_path)
    wanted = results(model)["logits"]
    for make, scale in ((packed, 0), (decoded, 1e-4)):
        loaded = peft.PeftModel.from_pretrained(make(), tmp_path, is_trainable=True).eval()
        torch.testing.assert_close(results(loaded)["logits"], wanted, rtol=scale, atol=scale)


@pytest.mark.parametrize("function", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("name", MERGED)
def test_an_adapter_that_cannot_be_merged_in_one_layer_is_merged_in_none(name: str, function: str) -> None:
    """The last of the layers gets an inf; one of them is float, which peft changes in place."""
    model = packed()
    lowbit.dequantize_(model.model.layers[0].self_attn.q_proj)
    model = adapted(model, config_of(name))
    layer = list(bases(model))[-1]
    model.get_submodule(layer).get_base_layer().bias.data.fill_(torch.inf)
    own = [one for path, one in model.named_parameters() if path.startswith(layer) and one.requires_grad]
    shared = [one for one in model.parameters() if one.requires_grad]
    for one in own or shared:  # UniLoRA and VB-LoRA have their numbers beside the layers
        one.data.view(-1)[0] = torch.inf
    before, types = numbers(model), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"{function}: .*_proj cannot be merged, and nothing was|NaNs detected"):
        getattr(model, function)(safe_merge=True)
    assert same(numbers(model), before)
    assert [type(module) for module in model.modules()] == types
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())
    for one in own or shared:
        one.data.view(-1)[0] = 0.0
    model.merge_adapter(safe_merge=False)
    assert not same(numbers(model), before)


@pytest.mark.parametrize("name", ["LILY", "POLY"])
def test_what_peft_does_not_merge_stays_as_it_was(name: str) -> None:
    model = of(name)
    before = numbers(model)
    for function in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(NotImplementedError):
            function()
    assert same(numbers(model), before) and len(bases(model)) == 6


@pytest.mark.parametrize("name", MERGED)
def test_a_model_that_is_packed_below_its_adapters_computes_and_merges(name: str) -> None:
    model = adapted(decoded(), config_of(name))
    wanted = results(model)
    lowbit.quantize_(model, lowbit.int8_weight_only(32))
    assert all(type(base) is lowbit.QuantLinear for base in bases(model).values())
    got = results(model)
    assert got.keys() == wanted.keys() and (got["logits"] - wanted["logits"]).norm() < 0.05 * wanted["logits"].norm()
    model.merge_adapter()
    with torch.no_grad():
        assert (model(IDS).logits - wanted["logits"]).norm() < 0.05 * wanted["logits"].norm()


@pytest.mark.parametrize("name", sorted(set(MERGED) - {"ADALORA"}))  # which has one adapter that trains
def test_a_second_adapter_reads_the_weight_too(name: str) -> None:
    found = []
    for make in (packed, decoded):
        model = adapted(make(), config_of(name))
        torch.manual_seed(3)
        model.add_adapter("second", config_of(name))
        model.set_adapter("second")
        found.append(results(model))
    agree(*found)


@pytest.mark.parametrize("name", sorted(set(MERGED) - NO_UNMERGE))
def test_a_merged_adapter_that_is_disabled_gives_the_base(name: str) -> None:
    model = of(name)
    before = numbers(model)
    model.merge_adapter()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(IDS).logits, packed()(IDS).logits)
    assert same(numbers(model), before)


@pytest.mark.parametrize("name", ["DELORA", "HRA", "IA3", "LOHA", "OFT", "UNILORA"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_compute_and_merge(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = of(name)
    other = copied(model)
    assert torch.equal(results(other)["logits"], results(model)["logits"])
    other.merge_adapter()
    before = numbers(model)
    again = copied(other)
    again.unmerge_adapter()
    assert same(numbers(again), before) and not same(numbers(other), before)


@pytest.mark.parametrize("name", ["LORA", "HIRA", "OFT", "TINYLORA"])
def test_an_adapter_of_a_packed_table_merges(name: str) -> None:
    model = of(name, target_modules=["embed_tokens"])
    before, logits = numbers(model), results(model)["logits"]
    model.merge_adapter()
    merged = results_without_gradient(model)
    assert 0 < (merged - logits).norm() < 0.05 * logits.norm()
    model.unmerge_adapter()
    assert same(numbers(model), before)
    plain = model.merge_and_unload()
    assert type(plain.model.embed_tokens) is lowbit.QuantEmbedding
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, merged)


def results_without_gradient(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["FOURIERFT", "HIRA", "IA3", "TINYLORA", "UNILORA", "VERA"])
def test_a_conv1d_that_is_packed_or_float_again_has_its_adapter_the_right_way_round(name: str) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(96, 64), Conv1D(64, 96)).eval()
    options = {"feedforward_modules": []} if name == "IA3" else {}
    model = adapted(model, config_of(name, task_type=None, target_modules=["0", "1"], **options))
    x = torch.randn(5, 64)
    with torch.no_grad():
        wanted = model(x)
        lowbit.quantize_(model, lowbit.int8_weight_only(32))
        for change in (lambda: None, model.merge_adapter, model.unmerge_adapter, lambda: lowbit.dequantize_(model)):
            change()
            assert (model(x) - wanted).norm() < 0.05 * wanted.norm()


def test_a_weight_that_an_adapter_does_not_change_keeps_its_bytes() -> None:
    """Codes that are searched would not come back from their own decoded weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    lowbit.quantize_(model, lowbit.int4_weight_only(32))
    before = model[0].weight
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    model.merge_adapter()
    assert model.base_model.model[0].base_layer.weight is before
    beft = adapted(model.unload(), peft.BeftConfig(target_modules=["0"]))
    bias = beft.base_model.model[0].base_layer.bias.clone()
    beft.merge_adapter()
    assert beft.base_model.model[0].base_layer.weight is before
    assert not torch.equal(beft.base_model.model[0].base_layer.bias, bias)


def test_a_sparse_weight_trains_and_refuses_to_merge_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    lowbit.quantize_(model[0], lowbit.int8_weight_only())
    lowbit.quantize_(model[1], lowbit.int8_dynamic_activation_int8_semi_sparse_weight())
    model = adapted(model, peft.LoHaConfig(target_modules=["0", "1"]))
    before = numbers(model)
    with pytest.raises(ValueError, match=r"merge_and_unload: 1 cannot be merged, and nothing was: merge: a weight must be dense"):
        model.merge_and_unload()
    assert same(numbers(model), before)


def test_methods_over_one_another_merge_in_a_mixed_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only(32))
    x = torch.randn(5, 64)
    plain = model(x)
    mixed = peft.get_peft_model(
        model, peft.LoHaConfig(target_modules=["0", "1"], init_weights=False), "one", mixed=True
    )
    mixed.add_adapter("two", peft.LoraConfig(target_modules=["1"], init_lora_weights=False))
    mixed.set_adapter(["one", "two"])
    with torch.no_grad():
        wanted = mixed.eval()(x)
        assert (wanted - plain).norm() > 0.01 * plain.norm()
        merged = mixed.merge_and_unload()
        assert [type(layer) for layer in merged] == [lowbit.QuantLinear] * 2
        assert (merged(x) - wanted).norm() < 0.02 * wanted.norm()


def test_a_layer_computes_while_another_thread_calls_it() -> None:
    """A weight is lent to one call, not to the layer."""
    from concurrent.futures import ThreadPoolExecutor

    model = of("HRA")
    with torch.no_grad():
        wanted = model(IDS).logits

        def logits(_: int) -> Tensor:
            with torch.no_grad():
                return model(IDS).logits

        with ThreadPoolExecutor(4) as pool:
            assert all(torch.equal(got, wanted) for got in pool.map(logits, range(16)))
