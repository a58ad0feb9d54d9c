# SPDX-License-Identifier: Apache-2.0
"""Fused models in training with LoRA: the loss and gradients of the model that is not fused, by the Functions that are
expected, and its own code where something is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import MODELS, made, prompt
from torch import Tensor, nn

import lowbit

peft = pytest.importorskip("peft")

NORM, HEADS, MLP = "_RmsNormBackward", "_RotaryHeadsBackward", "_LoraGatedMLPBackward"
WITHOUT = {
    NORM: {"stablelm", "cohere", "cohere2", "olmo", "phi", "gpt_neox", "gpt_neox_in_turn", "nemotron", "starcoder2"},
    HEADS: {
        "cohere",
        "cohere2",
        "olmo2",
        "gpt_neox",
        "gpt_neox_in_turn",
        "glm",
        "glm4",
        "helium",
        "ernie4_5",
        "hunyuan",
    },
    MLP: {"phi3", "phi", "gpt_neox", "gpt_neox_in_turn", "glm", "glm4", "nemotron", "starcoder2", "apertus"},
}
"""Models with layers of another kind: LayerNorms, other rotations or joined heads, MLPs without a gate or with one layer
for gate and up."""


def pair(name: str, config: str = "int8", more: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """A fused model in training with adapters of random numbers, and the same that is not fused."""
    models = []
    for _ in range(2):
        model = made(name, config, **(more or {}))
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
        models.append(peft.get_peft_model(model, peft.LoraConfig(**options)).train())
    lowbit.fuse(models[0])
    return models


def step(model: nn.Module, **inputs: Any) -> tuple[Tensor, list[Tensor], set[str]]:
    """The loss, the gradients of all factors and the names of the Functions."""
    inputs = {"input_ids": prompt(), "labels": prompt(), "use_cache": False} | inputs
    torch.manual_seed(2)
    loss = model(**inputs).loss
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names, left = set(), [loss.grad_fn]
    seen = set(left)
    while left:
        node = left.pop()
        names.add(type(node).__name__)
        more = {each for each, _ in node.next_functions if each is not None} - seen
        left += more
        seen |= more
    return loss.detach(), list(torch.autograd.grad(loss, factors)), names


def assert_same_step(models: list[Any], roundings: float = 1e-4, **inputs: Any) -> set[str]:
    (loss, found, names), (other, wanted, _) = (step(model, **inputs) for model in models)
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).abs().max()) <= roundings * float(theirs.abs().max())
    return names


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_model(name: str) -> None:
    names = assert_same_step(pair(name))
    for function, without in WITHOUT.items():
        assert (function in names) is (name not in without), function


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "up_proj"], ["down_proj"]], ids=" ".join)
def test_adapters_of_some_layers(targets: list[str]) -> None:
    assert {NORM, HEADS, MLP} <= assert_same_step(pair("qwen3", "int8", None, target_modules=targets))


def test_packed_documents_padding_and_a_cache() -> None:
    models = pair("llama")
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    assert HEADS in assert_same_step(models, input_ids=prompt(1), labels=prompt(1), position_ids=positions)
    mask = torch.ones_like(prompt())
    mask[1, :3] = 0
    assert HEADS in assert_same_step(models, attention_mask=mask)
    assert HEADS in assert_same_step(models, use_cache=True)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    fused, _ = pair("llama")
    kept, wanted, _ = step(fused)
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    again, found, _ = step(fused)
    assert torch.equal(kept, again) and all(map(torch.equal, wanted, found))


def test_what_is_dropped_is_dropped() -> None:
    names = assert_same_step(pair("llama", more={"attention_dropout": 0.5, "attention": "sdpa"}))
    assert HEADS not in names and MLP in names
    names = assert_same_step(pair("llama", lora_dropout=0.5))
    assert HEADS not in names and MLP not in names and NORM in names
    models = pair("llama")
    for model in models:
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        model.base_model.model.set_attn_implementation("sdpa")
    assert HEADS not in assert_same_step(models)


def test_a_norm_that_is_trained() -> None:
    models = pair("qwen3", modules_to_save=["q_norm"])
    assert HEADS not in assert_same_step(models)
    models = pair("llama")
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name or parameter.requires_grad)
    assert {NORM, HEADS, MLP} <= assert_same_step(models)


def test_dora_runs_pefts_code() -> None:
    names = assert_same_step(pair("llama", use_dora=True))
    assert HEADS not in names and MLP not in names


def test_a_packed_model_without_adapters_has_gradients_of_its_embeddings() -> None:
    models = [made("llama").train() for _ in range(2)]
    lowbit.fuse(models[0])
    assert {NORM, HEADS, MLP} <= assert_same_step(models)
