# SPDX-License-Identifier: Apache-2.0
"""Latent attention of transformers that projects the queries of a few tokens instead of all keys and values."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import lowbit  # noqa: E402
from lowbit.models.fused_latent_attention import FusedLatentAttention  # noqa: E402
from lowbit.models.latent_states import FEW, LatentStates  # noqa: E402
from lowbit.quant.fused import unfuse  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=64, q_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, pad_token_id=0)  # fmt: skip
CONFIGS = {
    "V3": transformers.DeepseekV3Config(**SIZES),
    "V2": transformers.DeepseekV2Config(**SIZES | dict(q_lora_rank=None)),
    "GLM": transformers.Glm4MoeLiteConfig(**{key: value for key, value in SIZES.items() if key != "first_k_dense_replace"}, mlp_layer_types=["dense"] * 2),
}  # fmt: skip
INT8 = lowbit.int8_weight_only(group_size=32)


def model_of(name: str, config=INT8, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="lowbit", dtype=dtype).eval()
    lowbit.quantize_(model, config)
    return model


def steps(model: torch.nn.Module, lengths: tuple[int, ...], mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The logits of calls with so many tokens, one after the other over one cache."""
    tokens = torch.randint(0, 64, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    cache, at, out = None, 0, []
    with torch.no_grad():
        for length in lengths:
            seen = None if mask is None else mask[:, : at + length]
            result = model(tokens[:, at : at + length], past_key_values=cache, attention_mask=seen, use_cache=True)
            cache, at = result.past_key_values, at + length
            out.append(result.logits)
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_is_that_of_transformers(name, padded):
    """A long prompt, single tokens, and a few at once, which see each other causally."""
    lengths = (FEW + 3, 1, 1, FEW, 2)
    mask = torch.ones(2, sum(lengths), dtype=torch.long)
    mask[1, :5] = 0
    model = model_of(name)
    wanted = steps(model, lengths, mask if padded else None)
    assert "model.layers.1.self_attn" in lowbit.fuse(model)
    assert all(isinstance(layer.self_attn, FusedLatentAttention) for layer in model.model.layers)
    for ours, theirs in zip(steps(model, lengths, mask if padded else None), wanted, strict=True):
        valid = ours[:1] if padded else ours  # a padded query sees nothing, and its row is arbitrary
        assert (valid - theirs[: len(valid)]).abs().max() <= 1e-4 * theirs.abs().max()
        assert (ours[:, -1] - theirs[:, -1]).abs().max() <= 1e-4 * theirs.abs().max()


def test_projected_queries_are_those_of_the_formula():
    """In float64; the copy of a weight is rounded to float32, and so is a sum of 24 products."""
    model = model_of("V3")
    lowbit.fuse(model)
    attention = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(2)
    query, latents, turned = (torch.randn(shape, generator=generator) for shape in ((2, 3, 1, 40), (2, 1, 7, 64), (2, 1, 7, 16)))
    with torch.no_grad():
        states, again = attention.expand_kv(latents, turned)
        assert isinstance(states, LatentStates) and again is states and states.shape == (2, 3, 7, 40)
        projected, keys, values, is_latent = states.with_queries(query)
        assert is_latent and keys.shape == (2, 1, 7, 80) and values.shape == (2, 1, 7, 64)
    weight = attention.kv_b_proj.dequantize(torch.float64).view(3, 44, 64)
    wanted = torch.einsum("bhlk,hkr->bhlr", query[..., :24].double(), weight[:, :24])
    bound = torch.einsum("bhlk,hkr->bhlr", query[..., :24].double().abs(), weight[:, :24].abs())
    assert ((projected[..., :64] - wanted).abs() <= (33 * 2**-24) * bound + 1e-7).all()
    assert torch.equal(projected[..., 64:], query[..., 24:])


def test_greedy_text_is_that_of_the_unfused_model():
    model = model_of("GLM")
    tokens = torch.randint(1, 64, (2, 9))
    asked = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = model.generate(tokens, **asked)
    lowbit.fuse(model)
    assert torch.equal(model.generate(tokens, **asked), wanted)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **asked), wanted)


def test_bfloat16():
    model = model_of("V3", dtype=torch.bfloat16)
    wanted = steps(model, (5, 1))[1]
    lowbit.fuse(model)
    assert (steps(model, (5, 1))[1] - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_a_changed_weight_is_used():
    model, other = model_of("V3"), model_of("V3")
    lowbit.fuse(model)
    steps(model, (3, 1))
    for one in (model, other):
        layer = one.model.layers[0].self_attn.kv_b_proj
        layer.load_state_dict({"weight": layer.weight.data.flip(0), "layout": layer.layout})
    wanted = steps(other, (3, 1))[1]
    assert (steps(model, (3, 1))[1] - wanted).abs().max() <= 2e-3 * wanted.abs().max()


def test_other_calls_project_the_keys_as_before():
    """Gradients, another attention, a hook; and a copy and an unfused model."""
    model = model_of("V3")
    lowbit.fuse(model)
    attention, states = model.model.layers[0].self_attn, (torch.randn(1, 1, 3, 64), torch.randn(1, 1, 3, 16))
    assert all(type(part) is torch.Tensor for part in attention.expand_kv(*states))  # gradients are on
    with torch.no_grad():
        assert type(copy.deepcopy(attention).expand_kv(*states)[0]) is LatentStates
        handle = attention.kv_b_proj.register_forward_hook(lambda *_: None)
        assert type(attention.expand_kv(*states)[0]) is torch.Tensor
        handle.remove()
        assert type(attention.expand_kv(*states)[0]) is LatentStates
        attention.config._attn_implementation = "sdpa"
        assert type(attention.expand_kv(*states)[0]) is torch.Tensor
        attention.config._attn_implementation = "lowbit"
        unfuse(model)
        assert type(attention.expand_kv(*states)[0]) is torch.Tensor


def test_what_is_left_says_why():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["V3"], attn_implementation="lowbit")
    lowbit.quantize_(model, INT8, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "kv_b_proj" not in name)
    assert lowbit.fuse(model).left["model.layers.0.self_attn"] == "kv_b_proj is Linear, no QuantLinear"
