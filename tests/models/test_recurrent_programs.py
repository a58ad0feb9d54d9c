# SPDX-License-Identifier: Apache-2.0
"""Decoders with recurrent layers whose layers, and in `generate` whose tokens, are one call: they say what they said
module by module, with padding, beams, a second turn and every cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, logits, prompt, transformers
from hybrids import BUDGET, close, padded, padding_is_masked, same_caches, tokens_are_runs
from torch import nn

import lowbit
from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.models.fused_decoder import FusedDecoder
from lowbit.models.recurrent_steps import RECURRENT_STEPS

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
DELTA = dict(
    head_dim=16, linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, layer_types=[*2 * ["linear_attention"], "full_attention", "linear_attention"],
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48)
GRANITE = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=16, shared_intermediate_size=64,
    residual_multiplier=0.3, attention_multiplier=0.1, embedding_multiplier=3.0, logits_scaling=2.5,
    layer_types=["linear_attention", "full_attention", *2 * ["linear_attention"]],
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_d_head=16, mamba_chunk_size=8)
NEMOTRON = dict(mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=24, chunk_size=8, head_dim=16)
KIMI = dict(
    kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_local_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, num_key_value_heads=4, n_group=1, topk_group=1,
    linear_head_dim=16, layer_types=[*2 * ["linear_attention"], "full_attention", "linear_attention"],
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text", DELTA),
    "qwen3_5_few_heads": ("Qwen3_5Text", {**DELTA, "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**DELTA, **EXPERTS}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **EXPERTS}),
    "qwen3_next_few_heads": (
        "Qwen3Next", {**DELTA, **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16},
    ),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA, "linear_allow_neg_eigval": True, "num_key_value_heads": 4}),
    "lfm2": ("Lfm2", {"conv_bias": True, "layer_types": ["full_attention", "conv", "conv", "full_attention"]}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "num_local_experts": 0, "position_embedding_type": "nope"}),
    "falcon_h1": ("FalconH1", {
        **MAMBA2, "mamba_d_ssm": 128, "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
        "ssm_out_multiplier": 0.6, "key_multiplier": 0.8, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
        "mlp_multipliers": [0.7, 1.4], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "head_dim": 16,
        "time_step_limit": (0.2, 0.8),
    }),
    "falcon_h1_norm": ("FalconH1", {**MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "head_dim": 16}),
    "nemotron_h": ("NemotronH", {
        **NEMOTRON, "time_step_min": 0.3,
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
    }),
    "nemotron_h_moe": ("NemotronH", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.6,
    }),
    "bamba": ("Bamba", {**MAMBA2, "time_step_limit": (0.2, 0.8), "attn_layer_indices": [1]}),
    "kimi_linear": ("KimiLinear", {**KIMI, "linear_num_heads": 4}),
    "kimi_linear_many_heads": ("KimiLinear", {**KIMI, "linear_num_heads": 16, "q_lora_rank": 48}),
    "granite_biased": ("GraniteMoeHybrid", {
        **GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True,
    }),
}  # fmt: skip


def made(name: str, config: str = "int8", dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, options = MODELS[name]
    sizes = {key: value for key, value in SIZES.items() if not (kind == "NemotronH" and key == "num_hidden_layers")}
    settings = getattr(transformers, f"{kind}Config")(**sizes | options)
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    model = cls._from_config(settings, attn_implementation="lowbit").eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    model.to(dtype)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def fused(model: nn.Module) -> nn.Module:
    report = lowbit.fuse(other := copy.deepcopy(model))
    assert isinstance(other.model, FusedDecoder) and isinstance(other, FusedCausalLM), report
    return other


def states_of(name: str) -> int:
    options = MODELS[name][1]
    types = options.get("layer_types", options.get("layers_block_type"))
    if types is None:
        types = SIZES["num_hidden_layers"] * ["hybrid" if "falcon" in name else "linear_attention"]
    return sum({"conv": 1, "hybrid": 4, "mlp": 0, "moe": 0}.get(kind, 2) for kind in types)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_all_layers_are_one_call(name: str, calls: list[int]) -> None:
    model = made(name)
    other, ids = fused(model), prompt(2, 12)
    of_caches = []
    for each in (model, other):
        cache = transformers.DynamicCache(config=each.config)
        results = [each(part, past_key_values=cache).logits for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:])]
        of_caches.append((torch.cat(results, 1), cache, each(ids, use_cache=False).logits))
    assert calls == 4 * [states_of(name)]
    close(of_caches[1][0], of_caches[0][0])
    close(of_caches[1][2], of_caches[0][2])
    same_caches(of_caches[1][1], of_caches[0][1])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_masked_in_the_call(name: str, calls: list[int]) -> None:
    """On the left, and in the middle of a second part."""
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    padding_is_masked(model, other, calls, states_of(name))
    seen[1, 7] = 0
    results = []
    for each in (model, other):
        cache = transformers.DynamicCache(config=each.config)
        each(ids[:, :5], attention_mask=seen[:, :5], past_key_values=cache)
        results.append(each(ids[:, 5:], attention_mask=seen, past_key_values=cache).logits)
    of_tokens = seen[:, 5:].bool()
    close(results[1][of_tokens], results[0][of_tokens])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("config", CONFIGS)
def test_each_token_of_generate_is_a_run(name: str, config: str, runs: list[bool]) -> None:
    model = made(name, config)
    tokens_are_runs(model, fused(model), runs, exact=config != "w4a8")


@pytest.mark.parametrize("name", MODELS)
def test_beams_and_a_second_turn(name: str) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    beams = {"num_beams": 3, "attention_mask": seen}
    assert torch.equal(answer(other, ids, **beams), answer(model, ids, **beams))
    told = []
    for each in (model, other):
        more = {"return_dict_in_generate": True, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
        first = answer(each, ids[:1, 4:], **more)
        again = torch.cat([first.sequences, prompt(1, 3)], 1)
        told.append(answer(each, again, past_key_values=first.past_key_values, **more))
    assert torch.equal(told[1].sequences, told[0].sequences)
    same_caches(told[1].past_key_values, told[0].past_key_values)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_either_goes_on_from_the_cache_of_the_other(name: str, calls: list[int]) -> None:
    model = made(name)
    other, ids = fused(model), prompt(2, 12)
    ends = []  # a token behind a prompt: where steps of time are limited, it differs from the end of one prompt
    for first, second in ((model, model), (model, other), (other, model)):
        begun = first(ids[:, :7], use_cache=True).past_key_values
        second(ids[:, 7:11], past_key_values=begun)
        ends.append(second(ids[:, 11:], past_key_values=begun).logits[:, -1])
    close(ends[1], ends[0])
    close(ends[2], ends[0])
    assert set(calls) == {states_of(name)} and len(calls) == 3


def test_a_static_cache_is_written_module_by_module(runs: list[bool]) -> None:
    model = made("qwen3_5")
    told = []
    for each in (model, fused(model)):
        told.append(answer(each, prompt(), past_key_values=transformers.StaticCache(model.config, max_cache_len=64)))
    assert torch.equal(*told) and not any(runs)


@torch.no_grad()
def test_states_that_a_step_cannot_write_are_left_to_the_modules(calls: list[int]) -> None:
    """States of another dtype or layout, and a cache that records past states."""
    model = made("qwen3_5")
    other, ids = fused(model), prompt(2, 9)
    changes: list[Callable[[Any], Any]] = [
        lambda layer: layer.conv_states.update({0: layer.conv_states[0].mT.contiguous().mT}),
        lambda layer: layer.recurrent_states.update({0: layer.recurrent_states[0].half()}),
        lambda layer: layer.activate_past_recording(),
    ]
    for change in changes:
        results = []
        for each in (model, other):
            cache = transformers.DynamicCache(config=each.config)
            each(ids[:, :5], past_key_values=cache)
            change(cache.layers[1])
            results.append(each(ids[:, 5:], past_key_values=cache).logits)
        close(results[1], results[0], 1e-2 if len(calls) < 2 else BUDGET)
    assert calls.count(states_of("qwen3_5")) == len(changes)  # the prompts


def test_assisted_decoding_is_refused_as_before() -> None:
    model = made("qwen3_5")
    for each in (model, fused(model)):
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            answer(each, prompt(1), assistant_model=model)


@torch.no_grad()
def test_layers_run_in_one_call_alone_too(calls: list[int]) -> None:
    """With a hook on one layer the others are still one call each, the recurrent ones too."""
    model = made("granite")
    other, ids = fused(model), prompt()
    seen: list[Any] = []
    other.model.layers[1].register_forward_hook(lambda *_: seen.append(None))
    close(logits(other, ids), logits(model, ids))
    assert len(seen) == 1 and calls == 4 * [2]


@torch.no_grad()
@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1"])
def test_steps_of_time_are_limited_in_prompts_alone(name: str) -> None:
    """A prompt of one token has limits, a token behind others has none, also with the layers called one by one."""
    model = made(name)
    other, alone = fused(model), fused(model)
    alone.model.layers[0].register_forward_hook(lambda *_: None)
    told = []
    for each in (model, other, alone):
        cache = transformers.DynamicCache(config=each.config)
        told.append([each(part, past_key_values=cache).logits for part in prompt(2, 7).split([1, 1, 4, 1], 1)])
    for one, *others in zip(*told, strict=True):
        for another in others:
            close(another, one)
    assert not torch.allclose(told[0][1][:, -1], logits(model, prompt(2, 7)[:, :2])[:, -1], rtol=1e-2)


@torch.no_grad()
def test_a_later_change_of_factors_counts() -> None:
    model = made("falcon_h1")
    other = fused(model)
    changes: list[Callable[[Any], Any]] = [
        lambda layer: layer.mamba.mup_vector.mul_(0.5),
        lambda layer: setattr(layer.mamba, "ssm_in_multiplier", 2.0),
        lambda layer: setattr(layer.self_attn, "key_multiplier", 0.3),
        lambda layer: setattr(layer.feed_forward, "gate_multiplier", 0.5),
        lambda layer: setattr(layer.feed_forward, "down_multiplier", 0.5),
        lambda layer: setattr(layer, "ssm_out_multiplier", 0.2),
    ]
    for change in changes:
        before = logits(other, prompt())
        for each in (model, other):
            change(each.model.layers[1])
        close(logits(other, prompt()), logits(model, prompt()))
        assert not torch.allclose(logits(other, prompt()), before)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a projection": lambda net: net.in_proj_z.register_forward_hook(lambda module, args, y: 2 * y),
    "an attribute": lambda net: setattr(net, "layer_norm_epsilon", 0.5),
    "A_log": lambda net: net.A_log.data.mul_(0.5),
    "eps of the norm": lambda net: setattr(net.norm, "variance_epsilon", 0.5),
    "another convolution": lambda net: net.conv1d.weight.data.mul_(0.5),
    "other taps": lambda net: setattr(net.conv1d.weight, "data", net.conv1d.weight.data.flip(-1)),
    "another norm": lambda net: setattr(net.norm, "weight", nn.Parameter(net.norm.weight.detach() * 2)),
    "training": lambda net: net.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_later_change_counts(change: Callable[[Any], Any]) -> None:
    model = made("qwen3_5")
    other = fused(model)
    for each in (model, other):
        logits(each, prompt())
        change(each.model.layers[0].linear_attn)
    close(logits(other, prompt()), logits(model, prompt()))


@torch.no_grad()
def test_a_later_change_of_a_float_projection_counts() -> None:
    model = made("qwen3_5_few_heads")
    other = fused(model)
    for each in (model, other):
        logits(each, prompt())
        each.model.layers[0].linear_attn.in_proj_a.weight.mul_(-2)
    close(logits(other, prompt()), logits(model, prompt()))


@torch.no_grad()
@pytest.mark.parametrize("changed", ["in_proj_qkvz", "in_proj_ba"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_few_heads"])
def test_a_later_change_of_projections_whose_rows_were_ordered_counts(name: str, changed: str) -> None:
    model = made(name)
    other = fused(model)
    for each in (model, other):
        logits(each, prompt())
        layer = getattr(each.model.layers[0].linear_attn, changed)
        layer.weight = nn.Parameter(layer.weight.roll(1, 0), requires_grad=False)
    close(logits(other, prompt()), logits(model, prompt()))


@torch.no_grad()
def test_a_later_change_of_mamba_counts() -> None:
    model = made("granite")
    other = fused(model)
    for each in (model, other):
        logits(each, prompt())
        each.model.layers[0].mamba.A_log.mul_(0.5)
        each.model.layers[0].mamba.D.data.mul_(2)
    close(logits(other, prompt()), logits(model, prompt()))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_rounds_no_more_than_the_modules_do(name: str) -> None:
    wide, ids = made(name), prompt(2, 20)
    narrow = made(name, dtype=torch.bfloat16)
    wanted, theirs, ours = (logits(model, ids).float() for model in (wide, narrow, fused(narrow)))
    assert (ours - wanted).norm() <= 1.3 * (theirs - wanted).norm()


def bailing_hybrid(safe_gate: bool) -> nn.Module:
    """Its decays are made by one linear layer; its latent attention has a gate, which is no step."""
    more = {"linear_num_heads": 4, "kda_safe_gate": safe_gate, "kda_lower_bound": -5.0}
    config = transformers.BailingHybridConfig(**SIZES | KIMI | more)
    torch.manual_seed(0)
    model = transformers.BailingHybridForCausalLM._from_config(config, attn_implementation="lowbit").eval()
    for module in model.modules():
        if hasattr(module, "A_log"):
            nn.init.normal_(module.A_log, std=0.5), nn.init.normal_(module.dt_bias, std=0.5)
    lowbit.quantize_(model, CONFIGS["int8"])
    return model


@torch.no_grad()
def test_layers_whose_decays_one_layer_makes_are_one_call_each(calls: list[int]) -> None:
    model = bailing_hybrid(False)
    lowbit.fuse(other := copy.deepcopy(model))
    results = []
    for each in (model, other):
        cache = transformers.DynamicCache(config=each.config)
        results.append([each(part, past_key_values=cache).logits for part in prompt(2, 9).split([7, 1, 1], 1)])
    for one, another in zip(*results, strict=True):
        close(another, one)
    assert calls.count(2) == 9  # others are mixtures of experts


def test_recurrent_layers_that_are_no_steps_are_named() -> None:
    """Decays with a bound below are no step."""
    report = lowbit.fuse(model := bailing_hybrid(True))
    assert any(isinstance(module, tuple(RECURRENT_STEPS)) for module in model.modules())
    assert report.left["model.layers.0"] == (
        "of its self_attn: a gated delta net whose decays are not those of A_log, dt_bias and linear layers is no step of "
        "a program"
    )
