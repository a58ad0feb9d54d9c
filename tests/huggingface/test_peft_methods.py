# SPDX-License-Identifier: Apache-2.0
"""Each method of peft over packed layers: the numbers of the decoded weights, or an error that names it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import QuantEmbedding

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig  # noqa: E402
from peft_methods import IDS, METHODS, SIZES, TARGETS, adapted, agree, config_of, decoded, packed, results  # noqa: E402

from lowbit.huggingface.peft import NO_LAYERS, REFUSED, SERVED  # noqa: E402

ALONE = {"XLORA", "MULTITASK_PROMPT_TUNING", "CARTRIDGE"}
"""Methods that want other adapters, models or a task: tested by themselves, or without linear layers."""


def test_every_method_of_this_peft_is_served_or_refused_by_name() -> None:
    """A method that is new in peft belongs into one of the three tables of huggingface/peft.py."""
    assert set(METHODS) == {name.value for name in peft.PEFT_TYPE_TO_TUNER_MAPPING}
    assert set(METHODS) == SERVED | REFUSED.keys() | NO_LAYERS
    assert not SERVED & REFUSED.keys() and not NO_LAYERS & (SERVED | REFUSED.keys())


@pytest.mark.parametrize("name", sorted((SERVED | NO_LAYERS) - ALONE))
def test_a_method_computes_and_trains_over_packed_layers_as_over_the_decoded_ones(name: str) -> None:
    head = name != "SHADOW"
    agree(*(results(adapted(make(head=head), config_of(name))) for make in (packed, decoded)))


@pytest.mark.parametrize("name", ["SHADOW", "XLORA"])
def test_a_method_that_takes_the_dtype_of_a_packed_table_is_refused(name: str) -> None:
    options = {"hidden_size": 64, "adapters": {}} if name == "XLORA" else {}
    with pytest.raises(
        ValueError, match=f"{name} takes the dtype of the first parameter, got model.embed_tokens as int8"
    ):
        peft.get_peft_model(packed(), config_of(name, **options))


@pytest.mark.parametrize("name", sorted(SERVED - ALONE))
def test_a_method_serves_a_model_in_bfloat16(name: str) -> None:
    got, wanted = (results(adapted(make(torch.bfloat16), config_of(name)))["logits"] for make in (packed, decoded))
    assert got.dtype == torch.bfloat16 and (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_that_needs_float_weights_is_refused_before_anything_changes(name: str) -> None:
    model = packed()
    before = {name: type(module) for name, module in model.named_modules()}
    options = {"target_modules": TARGETS} if name == "LN_TUNING" else {}
    with pytest.raises(ValueError, match=rf"get_peft_model: {name} {REFUSED[name]}, got model\..* as int8 g32; take"):
        peft.get_peft_model(model, config_of(name, **options))
    assert {name: type(module) for name, module in model.named_modules()} == before
    if name != "TRAINABLE_TOKENS":
        peft.get_peft_model(decoded(), config_of(name, **options))  # which it takes


def test_a_method_that_lowbit_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.huggingface.peft.SERVED", SERVED - {"VERA"})
    with pytest.raises(
        ValueError, match="get_peft_model: VERA is a method of peft that lowbit does not know, got model"
    ):
        peft.get_peft_model(packed(), config_of("VERA"))


def test_all_targets_are_looked_at_before_the_first_layer_is_replaced() -> None:
    """The one that is packed comes after float ones."""
    model = decoded()
    lowbit.quantize_(model, lowbit.int8_weight_only(32), lambda module, name: name.endswith("layers.1.mlp.down_proj"))
    with pytest.raises(ValueError, match="LN_TUNING trains a copy of the layer, got model.layers.1.mlp.down_proj as"):
        peft.get_peft_model(model, config_of("LN_TUNING", target_modules=TARGETS))
    assert not any("base_layer" in module._modules for module in model.modules())


@pytest.mark.parametrize("name", ["GLORA", "LN_TUNING"])
def test_a_layer_with_an_adapter_that_needs_its_float_weight_stays_float(name: str) -> None:
    model = peft.get_peft_model(decoded(), config_of(name, target_modules=TARGETS))
    report = lowbit.quantize_(model, lowbit.int8_weight_only(32))
    notes = [row.note for row in report.skipped if row.layer.endswith("down_proj.base_layer")]
    assert notes == ["an adapter of peft needs its float weight"] * 2


BLOCKS = BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "qalora": {"use_qalora": True, "qalora_group_size": 16},
    "alora": {"alora_invocation_tokens": [3, 4]},
    "velora": {"velora_config": peft.VeloraConfig()},
    "monteclora": {"monteclora_config": MontecloraConfig()},
    "bdlora": {"use_bdlora": BLOCKS},
    "lora_bias": {"lora_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_lora_computes_and_trains_over_packed_layers_as_over_the_decoded_ones(variant: str) -> None:
    agree(*(results(adapted(make(), config_of("LORA", **VARIANTS[variant]))) for make in (packed, decoded)))


def test_xlora_mixes_adapters_over_packed_layers(tmp_path: Any) -> None:
    found = []
    for make in (packed, decoded):
        for name in "01":
            config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, r=4 + int(name))
            one = adapted(make(head=False), config)  # two equal ones would leave the classifier a gradient of 0
            one.save_pretrained(tmp_path / name)
        adapters = {name: str(tmp_path / name) for name in "01"}
        model = adapted(make(head=False), config_of("XLORA", hidden_size=64, xlora_depth=1, adapters=adapters))
        found.append(results(model))
    agree(*found)


@pytest.mark.parametrize("name", ["LORA", "HIRA", "OFT", "TINYLORA"])
def test_a_method_serves_a_packed_table_of_words(name: str) -> None:
    config = {"target_modules": ["embed_tokens"]}
    agree(*(results(adapted(model, config_of(name, **config))) for model in (packed(), decoded())))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' reads float weights, got model.layers.0"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA' reads"),
        ({"init_lora_weights": "mica"}, "init_lora_weights='mica' reads"),
        ({"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}, "init_lora_weights='lora_ga' reads"),
        ({"kasa_config": KasaConfig()}, "kasa_config reads float weights, got model.layers.0"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights='orthogonal' reads"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save trains float weights, got lm_head as int8 g32"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save trains float weights, got model.embed_tokens as int8"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices trains float weights, got model.embed_tokens"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "trainable_token_indices trains float weights, got lm_head"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "use_dora on an embedding reads float weights"),
    ],
)
def test_what_reads_or_trains_a_weight_is_refused_before_anything_changes(options: dict[str, Any], match: str) -> None:
    model = packed()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=match):
        peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": TARGETS} | options))
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not any(parameter.is_floating_point() and not parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["PROMPT_TUNING", "P_TUNING", "CPT"])
def test_prompts_are_put_before_the_words_of_a_packed_table(name: str) -> None:
    model = peft.get_peft_model(packed(), config_of(name))
    assert type(model.word_embeddings) is QuantEmbedding
    assert "get_submodule" not in vars(model.base_model)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="-".join)
def test_lora_serves_the_head_and_its_table(targets: list[str]) -> None:
    config = {"task_type": "CAUSAL_LM", "target_modules": targets}
    agree(*(results(adapted(model, peft.LoraConfig(**config))) for model in (packed(), decoded())))


def test_a_classifier_that_is_float_is_saved_and_one_that_is_packed_is_named() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=16, pad_token_id=0))
    other = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=TARGETS, task_type="SEQ_CLS")

    def is_other(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "score"

    lowbit.quantize_(model, lowbit.int8_weight_only())
    with pytest.raises(ValueError, match="modules_to_save trains float weights, got score as int8"):
        peft.get_peft_model(model, copy.deepcopy(config))
    lowbit.quantize_(other, lowbit.int8_weight_only(), filter_fn=is_other)
    assert peft.get_peft_model(other, config)(IDS).logits.shape == (2, 16)
