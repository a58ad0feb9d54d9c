# SPDX-License-Identifier: Apache-2.0
"""Each method of peft over packed layers: the numbers of the decoded weights, or an error that names it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantEmbedding, QuantLinear

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from lowbit.huggingface.peft import READS_WEIGHT  # noqa: E402

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.arange(24).view(2, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "C3A": {"block_size": 16},
    "VBLORA": {"vector_length": 16},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "ADAPTION_PROMPT": {"target_modules": "self_attn", "adapter_len": 4, "adapter_layers": 1},
}
NEED_MORE = {"POLY", "XLORA", "MULTITASK_PROMPT_TUNING", "SHADOW"}
"""Methods that want ids of tasks, other adapters or models."""


def packed() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only(32), head=lowbit.int8_weight_only(32))
    assert type(model.lm_head) is QuantLinear and type(model.model.embed_tokens) is QuantEmbedding
    return model


def decoded() -> nn.Module:
    model = packed()
    lowbit.dequantize_(model)
    return model


def method_of(config: type) -> str:
    return config(task_type="CAUSAL_LM").peft_type.value


def configs() -> dict[str, type]:
    found = [cls for _, cls in inspect.getmembers(peft, inspect.isclass) if issubclass(cls, peft.PeftConfig)]
    made = {}
    for cls in found:
        try:
            made[method_of(cls)] = cls
        except (AttributeError, TypeError, ValueError):  # abstract, or with fields that have no default
            continue
    return made


METHODS = {name: cls for name, cls in configs().items() if name not in NEED_MORE}


def made(name: str) -> Any:
    cls = METHODS[name]
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if "target_modules" in cls.__dataclass_fields__ and name != "LN_TUNING":
        options["target_modules"] = TARGETS
    if "num_virtual_tokens" in cls.__dataclass_fields__:
        options["num_virtual_tokens"] = 4
    return cls(**options | OPTIONS.get(name, {}))


def results(model: nn.Module, config: Any) -> list[Tensor]:
    """Logits and gradients, with adapters that are not zero."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data += 0.02 * torch.randn_like(parameter)
    out = model(IDS, labels=IDS)
    grads = torch.autograd.grad(out.loss, trained, allow_unused=True)
    return [out.logits.detach(), *(grad for grad in grads if grad is not None)]


def agree(config: Callable[[], Any]) -> None:
    got, wanted = results(packed(), config()), results(decoded(), config())
    assert len(got) == len(wanted) > 1
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_the_methods_of_peft_are_found_and_those_that_read_weights_are_among_them() -> None:
    assert len(METHODS) > 30 and METHODS.keys() >= READS_WEIGHT and {"LORA", "IA3", "OFT"} <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_serves_packed_layers_or_names_itself(name: str) -> None:
    if name not in READS_WEIGHT:
        agree(lambda: made(name))
        return
    model = packed()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=rf"get_peft_model: {name} reads float weights, got model\..* as int8 g32"):
        peft.get_peft_model(model, made(name))
    assert {name: type(module) for name, module in model.named_modules()} == before
    if name != "TRAINABLE_TOKENS":
        peft.get_peft_model(decoded(), made(name))  # which it takes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' reads float weights, got model.layers.0"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' reads"),
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
    model = peft.get_peft_model(packed(), made(name))
    assert type(model.word_embeddings) is QuantEmbedding
    assert "get_submodule" not in vars(model.base_model)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="-".join)
def test_lora_serves_the_head_and_its_table(targets: list[str]) -> None:
    agree(lambda: peft.LoraConfig(target_modules=targets))


def test_a_classifier_that_is_float_is_saved_and_one_that_is_packed_is_named() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=2, pad_token_id=0))
    other = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=TARGETS, task_type="SEQ_CLS")

    def is_other(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "score"

    lowbit.quantize_(model, lowbit.int8_weight_only())
    with pytest.raises(ValueError, match="modules_to_save trains float weights, got score as int8"):
        peft.get_peft_model(model, copy.deepcopy(config))
    lowbit.quantize_(other, lowbit.int8_weight_only(), filter_fn=is_other)
    assert peft.get_peft_model(other, config)(IDS).logits.shape == (2, 2)
