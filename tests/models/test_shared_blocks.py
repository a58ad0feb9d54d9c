# SPDX-License-Identifier: Apache-2.0
"""Zamba 2, whose layers share blocks of attention and MLP with adapters for each use: its layers, and in `generate` its
tokens, are one call that says what transformers' model says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, logits, prompt, transformers
from hybrids import (
    close,
    in_parts,
    one_call_each,
    padded,
    padding_is_masked,
    same_caches,
    same_gradients,
    tokens_are_runs,
)
from torch import nn

import lowbit
from lowbit.models import fused_mamba2
from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.models.fused_decoder import FusedDecoder
from lowbit.models.shared_block import FusedSharedAttention, FusedSharedMLP

SIZES = dict(
    vocab_size=97, hidden_size=64, num_hidden_layers=6, layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
    mamba_d_state=16, n_mamba_heads=8, num_attention_heads=4, adapter_rank=32, intermediate_size=96,
    pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "one block": dict(use_shared_attention_adapter=True, use_mem_rope=True),
    "two blocks": dict(num_mem_blocks=2),
    "two blocks with all": dict(num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, hidden_act="silu"),
}  # fmt: skip
STATES = 2 * 6 + 2 * 4
"""Two of each mixer, and keys and values of the layers with a shared block."""
LAYERS = [1, 2, 4, 5]


def made(name: str, config: str = "int8", dtype: torch.dtype = torch.float32) -> nn.Module:
    settings = transformers.Zamba2Config(**SIZES | MODELS[name])
    torch.manual_seed(0)
    model = transformers.Zamba2ForCausalLM._from_config(settings, attn_implementation="lowbit").eval()
    for module in model.modules():  # norms are made of ones, decays of 1 to 16
        for key, parameter in module._parameters.items():
            if key == "A_log":
                nn.init.normal_(parameter, std=0.5)
            elif parameter is not None and parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    for key, parameter in model.named_parameters():
        if "adapter" in key:
            parameter.data *= 5  # as large as what they add to
    model.to(dtype)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def fused(model: nn.Module) -> nn.Module:
    report = lowbit.fuse(other := copy.deepcopy(model))
    assert isinstance(other, FusedCausalLM) and not report.left, report
    return other


def block(model: nn.Module, index: int) -> Any:
    return model.model.layers[index].shared_transformer


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_and_tokens_are_one_call_each(name: str, calls: list[int]) -> None:
    model = made(name)
    other, parts = fused(model), list(prompt(2, 11).split([7, *4 * [1]], 1))
    one_call_each(model, other, calls, STATES)
    wanted, _ = in_parts(5 * [model], parts)
    for order in ([model, other, *3 * [model]], [other, model, *3 * [other]]):
        close(in_parts(order, parts)[0], wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_masked_in_the_call(name: str, calls: list[int]) -> None:
    model = made(name)
    padding_is_masked(model, fused(model), calls, STATES)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("config", CONFIGS)
def test_each_token_of_generate_is_a_run(name: str, config: str, runs: list[bool]) -> None:
    model = made(name, config)
    tokens_are_runs(model, fused(model), runs, exact=config != "w4a8")


@pytest.mark.parametrize("name", MODELS)
def test_beams(name: str) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    assert torch.equal(answer(other, ids, num_beams=3, attention_mask=seen), answer(model, ids, num_beams=3, attention_mask=seen))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_rounds_no_more_than_the_modules_do(name: str, calls: list[int]) -> None:
    wide, narrow, ids = made(name), made(name, dtype=torch.bfloat16), prompt(2, 20)
    other = fused(narrow)
    wanted, theirs, ours = (logits(model, ids) for model in (wide, narrow, other))
    assert calls == [STATES] and ours.dtype is theirs.dtype
    assert (ours.float() - wanted).norm() <= 1.2 * (theirs.float() - wanted).norm()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_modules_of_a_block_say_the_same_by_themselves(name: str, calls: list[int]) -> None:
    """Where the hidden states of the layers are asked for, modules run, with keys and values that are appended in
    place."""
    model = made(name)
    other = fused(model)
    assert sum(isinstance(module, FusedSharedAttention) for module in other.modules()) == len(LAYERS)
    assert sum(isinstance(module, FusedSharedMLP) for module in other.modules()) == len(LAYERS)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for part in prompt(2, 9).split([8, 1], 1):
        told, wanted = (
            each(part, past_key_values=cache, output_hidden_states=True)
            for each, cache in zip((other, model), caches, strict=True)
        )
        for one, two in zip(told.hidden_states, wanted.hidden_states, strict=True):
            close(one, two)
    same_caches(*caches)
    assert not calls


@pytest.mark.parametrize("name", MODELS)
def test_gradients_pass_through_shared_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    same_gradients(model, fused(model), monkeypatch, fused_mamba2, "ssd")


@torch.no_grad()
def test_a_copy_of_a_fused_model_is_one_call_too(calls: list[int]) -> None:
    other = copy.deepcopy(fused(model := made("two blocks")))
    close(logits(other, prompt()), logits(model, prompt()))
    assert calls == [STATES]


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_blocks_are_shared_after_an_answer(name: str) -> None:
    model = made(name)
    other = fused(model)
    answer(other, prompt())
    for at in ("self_attn.q_proj", "self_attn.v_proj", "feed_forward.gate_up_proj"):
        memory = {block(other, index).get_submodule(at).weight.data_ptr() for index in LAYERS}
        assert len(memory) == MODELS[name].get("num_mem_blocks", 1)
    assert sum(each.numel() for each in other.parameters()) == sum(each.numel() for each in model.parameters())


@torch.no_grad()
def test_a_later_change_of_an_adapter_counts() -> None:
    model = made("one block")
    other = fused(model)

    def adapter(each: nn.Module, number: int) -> Any:
        return block(each, 2).feed_forward.gate_up_proj_adapter_list[number]

    def half(layer: nn.Module) -> None:
        layer.weight.data.copy_(type(layer).from_linear(nn.Linear(layer.in_features, layer.out_features), layer.spec).weight)

    changes: list[Callable[[nn.Module], Any]] = [
        lambda each: half(adapter(each, 1)[0]),
        lambda each: half(adapter(each, 2)[1]),
        lambda each: adapter(each, 1)[1].register_forward_hook(lambda module, args, y: 2 * y),
        lambda each: block(each, 2).self_attn.linear_q_adapter_list[1][0].register_forward_hook(lambda module, args, y: 2 * y),
        lambda each: setattr(block(each, 4).feed_forward, "act_fn", nn.Tanh()),
    ]
    for change in changes:
        before = logits(other, prompt())
        for each in (model, other):
            torch.manual_seed(1)
            change(each)
        close(logits(other, prompt()), logits(model, prompt()))
        assert not torch.allclose(logits(other, prompt()), before)


@torch.no_grad()
def test_float_adapters_are_called_module_by_module(calls: list[int]) -> None:
    model = made("one block")
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            for number, layer in enumerate(module):
                module[number] = layer.to_linear()
    report = lowbit.fuse(other := copy.deepcopy(model))
    assert any(isinstance(module, FusedDecoder) for module in other.modules()), report
    close(logits(other, prompt()), logits(model, prompt()))
    assert not calls


def test_adapters_that_are_no_pair_are_left() -> None:
    model = made("one block")
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            module.append(nn.Identity())
    report = lowbit.fuse(other := copy.deepcopy(model))
    for name in ("self_attn", "feed_forward"):
        assert report.left[f"model.layers.1.shared_transformer.{name}"] == "its adapters are no pairs of linear layers"
    close(logits(other, prompt()), logits(model, prompt()))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_can_be_cropped(name: str) -> None:
    """A second turn from a prefix says what a whole prompt says, and assisted decoding gives the greedy tokens."""
    other, ids = fused(made(name)), prompt(1, 20)
    wanted = logits(other, ids)[:, -1]
    cache = lowbit.croppable_cache(other, every=4)
    other(torch.cat([ids[:, :14], prompt(1, 3)], 1), past_key_values=cache, use_cache=True)
    left = lowbit.rewind_cache(cache, 14)
    assert 10 < left <= 14
    close(other(ids[:, left:], past_key_values=cache, use_cache=True).logits[:, -1], wanted)
    asked = dict(eos_token_id=-1, max_new_tokens=16)
    said = answer(other, ids, **asked)
    cache = lowbit.croppable_cache(other, every=8)
    assert torch.equal(answer(other, ids, past_key_values=cache, prompt_lookup_num_tokens=4, **asked), said)
