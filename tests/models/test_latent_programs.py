# SPDX-License-Identifier: Apache-2.0
"""Latent attention as steps of a decoder's program: all layers are one call, and so is a token of generate. Logits are
those of the model that is not fused, whatever is done to the cache in between; changes of a model count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import calls_of_layers
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import lowbit  # noqa: E402
from lowbit.models.growing_cache import GrowingLayer, side_by_side  # noqa: E402
from lowbit.models.latent_states import FEW  # noqa: E402

LATENT = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    kv_lora_rank=48, q_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, pad_token_id=0,
    eos_token_id=96, bos_token_id=1, max_position_embeddings=256,
)  # fmt: skip
EXPERTS = LATENT | dict(moe_intermediate_size=32, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1)
DENSE_FIRST = EXPERTS | dict(first_k_dense_replace=1)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.707}
CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DENSE_FIRST, n_group=2, topk_group=1),
    "kimi_k2": lambda: transformers.DeepseekV3Config(**DENSE_FIRST, n_group=1, topk_group=1, rope_parameters=YARN),
    "v3 in halves, without a latent query": lambda: transformers.DeepseekV3Config(**DENSE_FIRST | dict(q_lora_rank=None, attention_bias=True), n_group=1, topk_group=1, rope_interleave=False),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**DENSE_FIRST, n_group=3, topk_group=2, topk_method="group_limited_greedy"),
    "deepseek_v2 lite": lambda: transformers.DeepseekV2Config(**DENSE_FIRST | dict(q_lora_rank=None), topk_method="greedy", rope_parameters=YARN),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**EXPERTS, n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse", "sparse"]),
    "youtu": lambda: transformers.YoutuConfig(**LATENT),
    "minicpm3": lambda: transformers.MiniCPM3Config(**LATENT),
    "values wider than the rank": lambda: transformers.DeepseekV3Config(**DENSE_FIRST | dict(qk_nope_head_dim=16, v_head_dim=32, kv_lora_rank=24), n_group=1, topk_group=1),
}  # fmt: skip
BUDGET = 1e-4  # of the largest logit: three layers of float32 sums in another order
INT8 = lowbit.int8_weight_only(group_size=32)
LENGTHS = (FEW + 3, 1, 1, FEW, 2)


def model_of(name: str, dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for size, value in sizes.items():
        setattr(config, size, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lowbit", dtype=dtype).eval()
    for parameter in model.parameters():  # norms are made of ones, and biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    lowbit.quantize_(model, INT8)
    return model


def close(got: Tensor, wanted: Tensor, budget: float = BUDGET) -> None:
    assert (got - wanted).abs().max() <= budget * wanted.abs().max()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def steps(model: nn.Module, lengths: tuple[Any, ...], mask: Tensor | None = None) -> list[Tensor]:
    """The logits of calls with so many tokens over one cache. What is no number is done to the cache: tokens to remove,
    as a negative number, or a function of it."""
    ids, cache, at, out = tokens(2, 80), None, 0, []
    for length in lengths:
        if callable(length):
            length(cache)
        elif length < 0:
            cache.crop(length)
            at += length
        else:
            seen = None if mask is None else mask[:, : at + length]
            result = model(ids[:, at : at + length], past_key_values=cache, attention_mask=seen, use_cache=True)
            cache, at = result.past_key_values, at + length
            out.append(result.logits)
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_all_layers_are_one_call_and_logits_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt, whose modules are called one by one, tokens, and a few at once, with padding and without."""
    model, mask = model_of(name), torch.ones(2, sum(LENGTHS), dtype=torch.long)
    mask[1, :5] = 0
    for given in (None, mask):
        wanted = steps(model_of(name), LENGTHS, given)
        report = lowbit.fuse(model)
        assert given is not None or "model" in report, report
        with calls_of_layers(monkeypatch) as counts:
            got = steps(model, LENGTHS, given)
        assert [count for count in counts if count == 3] == 4 * [3], counts
        valid = slice(None) if given is None else slice(1)  # a padded query sees nothing, and its row is arbitrary
        for ours, theirs in zip(got, wanted, strict=True):
            close(ours[valid], theirs[valid])
            close(ours[:, -1], theirs[:, -1])


@pytest.mark.parametrize("dtype, budget", [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2 lite"])
def test_16_bits(name: str, dtype: torch.dtype, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = model_of(name, dtype), steps(model_of(name, dtype), (5, 1, 1))
    lowbit.fuse(model)
    with calls_of_layers(monkeypatch) as counts:
        for ours, theirs in zip(steps(model, (5, 1, 1)), wanted, strict=True):
            close(ours.float(), theirs.float(), budget)
    assert counts == [3, 3, 3]


def reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def saved(cache: Any) -> None:
    """As a cache that is copied and goes on."""
    for i, layer in enumerate(cache.layers):
        cache.layers[i] = copy.deepcopy(layer)


@pytest.mark.parametrize("what", [
    (5, 1, 1, -1, 1, -2, 3), (FEW + 4, 1, -FEW, 2, 1), (5, 1, reordered, 1, 1), (FEW + 4, reordered, 1, FEW + 2, 1, 1),
    (7, 1, saved, 1, FEW + 9, 1, -3, 1),
], ids=lambda what: " ".join(getattr(part, "__name__", str(part)) for part in what))  # fmt: skip
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_the_cache_stays_that_of_transformers(name: str, what: tuple[Any, ...]) -> None:
    """Cropped, reordered, copied, and behind them a prompt of a second turn."""
    model, other = model_of(name), model_of(name)
    lowbit.fuse(model)
    for ours, theirs in zip(steps(model, what), steps(other, what), strict=True):
        close(ours, theirs)


def test_the_cache_has_the_tensors_of_transformers() -> None:
    """Latent vectors as keys, rotated keys as values; side by side, they are read without a copy."""
    model, other = model_of("deepseek_v3"), model_of("deepseek_v3")
    lowbit.fuse(model)
    with torch.no_grad():
        ids = tokens(2, 12)
        caches = [each(ids, use_cache=True).past_key_values for each in (model, other)]
        for each, cache in zip((model, other), caches, strict=True):
            each(ids[:, :1], past_key_values=cache, use_cache=True)
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert type(ours) is GrowingLayer and ours.keys.shape == (2, 1, 13, 48) and ours.values.shape == (2, 1, 13, 16)
        close(ours.keys, theirs.keys)
        close(ours.values, theirs.values)
        whole = side_by_side(ours.keys, ours.values)
        assert whole is not None and torch.equal(whole, torch.cat([ours.keys, ours.values], dim=-1))
        assert whole.data_ptr() == ours.keys.data_ptr()


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2 lite", "glm4_moe_lite", "minicpm3"])
@pytest.mark.parametrize("asked", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generated_text_is_that_of_the_model(name: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a padded batch, and of a second turn over the cache of the first; a greedy token is one run."""
    model, other, ids, mask = model_of(name), model_of(name), tokens(2, FEW + 2), torch.ones(2, FEW + 2, dtype=torch.long)
    mask[0, :6] = 0
    ids[0, :6] = 0
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, return_dict_in_generate=True, **asked)
    report = lowbit.fuse(model)
    assert ("(model)" in report) == (name != "minicpm3")  # which divides what its head reads
    said = []
    for each in (other, model):
        with calls_of_layers(monkeypatch) as counts:
            first = each.generate(ids, attention_mask=mask, **options)
        said.append(first.sequences)
        if not asked:
            more = torch.cat([first.sequences, tokens(2, 3, seed=2)], dim=1)
            seen = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], dim=1)
            said.append(each.generate(more, attention_mask=seen, past_key_values=first.past_key_values, **options).sequences)
    assert all(map(torch.equal, said[: len(said) // 2], said[len(said) // 2 :]))
    assert counts.count(3) == 7


@pytest.mark.parametrize("change", ["a hook", "an eps", "a scale", "a norm", "weights", "kv_b_proj", "a float layer"])
def test_a_change_counts(change: str) -> None:
    """In the next call, whether the program is written anew or the modules are called."""
    model, other = model_of("deepseek_v3"), model_of("deepseek_v3")
    lowbit.fuse(model)
    before, called = steps(model, (5, 1)), []
    for each in (model, other):
        attention = each.model.layers[1].self_attn
        if change == "a hook":
            attention.kv_a_layernorm.register_forward_hook(lambda _, given, y: called.append(y) or 2 * y)
        elif change == "an eps":
            attention.q_a_layernorm.variance_epsilon = 3.0
        elif change == "a scale":
            attention.scaling *= 3
        elif change == "a norm":
            attention.kv_a_layernorm = copy.deepcopy(attention.kv_a_layernorm)
            attention.kv_a_layernorm.weight = nn.Parameter(attention.kv_a_layernorm.weight.detach() * 2)
        elif change == "a float layer":
            attention.q_a_proj = nn.Linear(64, 32, bias=False)
            nn.init.constant_(attention.q_a_proj.weight, 0.1)
        else:
            layer = attention.kv_b_proj if change == "kv_b_proj" else attention.q_b_proj
            layer.load_state_dict({"weight": layer.weight.data.flip(0), "layout": layer.layout})
    wanted = steps(other, (5, 1))
    for ours, theirs, old in zip(steps(model, (5, 1)), wanted, before, strict=True):
        close(ours, theirs, 2e-4)
        assert (ours - old).abs().max() > 1e-3 * theirs.abs().max()
    assert bool(called) == (change == "a hook")


def test_lora_beside_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all projections but kv_b_proj it is part of the call; with one on this too, the module runs its own code."""
    peft = pytest.importorskip("peft")
    for targets, one_call in ((["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], True), (["kv_b_proj"], False)):
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        models = []
        for fused in (True, False):
            model = model_of("youtu")
            torch.manual_seed(1)
            model = peft.get_peft_model(model, config).eval()
            if fused:
                lowbit.fuse(model)
            models.append(model)
        wanted = steps(models[1], (5, 1))
        with calls_of_layers(monkeypatch) as counts:
            for ours, theirs in zip(steps(models[0], (5, 1)), wanted, strict=True):
                close(ours, theirs)
        assert (counts == [3, 3]) is one_call


def test_an_attention_that_computes_more_is_left_with_the_reason() -> None:
    model = model_of("deepseek_v3")
    for layer, change in zip(model.model.layers, ("child", "forward", "float"), strict=True):
        attention = layer.self_attn
        if change == "child":
            attention.indexer = nn.Linear(2, 2)
        elif change == "forward":
            attention.__class__ = type("Scaled", (type(attention),), {"forward": _twice})
        else:
            attention.q_a_proj = nn.Linear(64, 32, bias=False)
    left = lowbit.fuse(model).left
    said = [left[f"model.layers.{i}"] for i in range(3)]
    assert said == [
        "of its self_attn, latent attention: it has indexer",
        "of its self_attn, latent attention: it does not compute latent attention as steps do",
        "of its self_attn, latent attention: q_a_proj is Linear, no QuantLinear",
    ]


def test_latent_vectors_of_the_size_of_rotated_keys_are_left_to_the_modules() -> None:
    model, other = (model_of("youtu", kv_lora_rank=16) for _ in range(2))
    assert lowbit.fuse(model).left["model.layers.0"].endswith("its latent vectors have the size of its rotated keys")
    for ours, theirs in zip(steps(model, LENGTHS), steps(other, LENGTHS), strict=True):
        close(ours, theirs)


def _twice(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    out, weights = type(self).__mro__[1].forward(self, hidden_states, *args, **kwargs)
    return 2 * out, weights
