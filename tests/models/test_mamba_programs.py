# SPDX-License-Identifier: Apache-2.0
"""Models of Mamba-1 and Mamba-2 alone, and Jamba, whose layers, and in `generate` whose tokens, are one call: they say
what transformers' model says, with padding, beams and either's caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, logits, prompt, transformers
from hybrids import (
    BUDGET,
    cache_name,
    close,
    in_parts,
    one_call_each,
    padded,
    padding_is_masked,
    same_caches,
    tokens_are_runs,
)
from torch import nn

import lowbit
from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.quant.typed_linear import TypedQuantLinear

SIZES = dict(vocab_size=97, hidden_size=64, num_hidden_layers=3, pad_token_id=0, eos_token_id=96, bos_token_id=1)
MAMBA = dict(state_size=16, intermediate_size=128, time_step_rank=6)
MAMBA2 = dict(state_size=24, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)
JAMBA = dict(
    mamba_d_state=16, mamba_dt_rank=6, mamba_expand=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, attn_layer_period=3, attn_layer_offset=1, max_position_embeddings=256,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {**MAMBA2, "time_step_limit": (0.2, 0.8)}),
    "mamba2_narrow": ("Mamba2", {**MAMBA2, "residual_in_fp32": False, "tie_word_embeddings": False}),
    "mamba": ("Mamba", MAMBA),
    "mamba_biases": ("Mamba", {**MAMBA, "state_size": 5, "use_bias": True, "use_conv_bias": False}),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "jamba": ("Jamba", {**JAMBA, "num_experts": 1, "num_experts_per_tok": 1}),
    "jamba_experts": ("Jamba", {
        **JAMBA, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
    }),
}  # fmt: skip
STATES = 6  # two of each layer
ALONE = [name for name in MODELS if "jamba" not in name]


def made(name: str, config: str = "int8", dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Module:
    kind, options = MODELS[name]
    settings = getattr(transformers, f"{kind}Config")(**SIZES | options | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(settings, attn_implementation="lowbit").eval()
    for module in model.modules():  # norms are made of ones, biases of zeros, decays of 1 to 16
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
            elif key == "A_log":
                nn.init.normal_(parameter, std=0.5)
    model.to(dtype)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def fused(model: nn.Module) -> nn.Module:
    report = lowbit.fuse(other := copy.deepcopy(model))
    assert isinstance(other, FusedCausalLM), report
    return other


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_and_tokens_are_one_call_each(name: str, calls: list[int]) -> None:
    model = made(name)
    one_call_each(model, fused(model), calls, STATES)


@pytest.mark.parametrize("name", ["mamba2", "mamba2_narrow", "mamba", "falcon_mamba"])
def test_the_packed_head_is_a_part_of_the_run_of_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which transformers reads the dtype; tied to the table or not. The model calls it for the prompt alone."""
    model = made(name)
    assert type(model.lm_head) is TypedQuantLinear
    other, called, forward = fused(model), [], TypedQuantLinear.forward
    monkeypatch.setattr(TypedQuantLinear, "forward", lambda self, x: called.append(self) or forward(self, x))
    said = answer(other, prompt(2, 7))
    assert len(called) == 1 and called[0] is other.lm_head
    assert torch.equal(said, answer(model, prompt(2, 7))) and len(called) > 5


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_either_goes_on_from_the_cache_of_the_other(name: str) -> None:
    model = made(name)
    other, parts = fused(model), list(prompt(2, 9).split([7, 1, 1], 1))
    wanted, _ = in_parts([model, model, model], parts)
    for order in ([model, other, model], [other, model, other]):
        close(in_parts(order, parts)[0], wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_parts_is_one_prompt(name: str, calls: list[int]) -> None:
    """transformers begins a second part of Mamba-1 with zeros, and limits steps of time of Mamba-2 in all parts."""
    other, ids = fused(made(name)), prompt(2, 12)
    close(in_parts(3 * [other], list(ids.split([5, 4, 3], 1)))[0], logits(other, ids))
    assert calls == 4 * [STATES]


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
def test_beams_and_logits_that_are_returned(name: str) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    beams = {"num_beams": 3, "attention_mask": seen}
    assert torch.equal(answer(other, ids, **beams), answer(model, ids, **beams))
    more = {"return_dict_in_generate": True, "output_logits": True, "attention_mask": seen, "max_new_tokens": 6}
    told, wanted = (answer(each, ids, **more) for each in (other, model))
    for one, two in zip(told.logits, wanted.logits, strict=True):
        assert one.dtype is two.dtype
        close(one, two)
    same_caches(told.past_key_values, wanted.past_key_values)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS])
def test_bfloat16_rounds_no_more_than_the_modules_do(name: str, runs: list[bool]) -> None:
    """Of many layers, whose sum transformers keeps in float32 (residual_in_fp32)."""
    layers = 12 if name in ALONE else 3
    wide, ids = made(name, layers=layers), prompt(2, 20)
    narrow = made(name, dtype=torch.bfloat16, layers=layers)
    other = fused(narrow)
    wanted, theirs, ours = (logits(model, ids) for model in (wide, narrow, other))
    assert ours.dtype is theirs.dtype
    assert (ours.float() - wanted).norm() <= 1.2 * (theirs.float() - wanted).norm()
    assert len(answer(other, ids, eos_token_id=None)) == 2 and runs == 11 * [True]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "falcon_mamba"])
def test_the_sum_of_layers_in_bfloat16_is_float32(name: str, calls: list[int]) -> None:
    other = fused(made(name, dtype=torch.bfloat16))
    y = other.backbone(prompt()).last_hidden_state
    assert len(calls) == 1 and y.dtype is torch.float32 and not torch.equal(y, y.bfloat16().float())


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_a_later_change_of_a_mixer_counts(name: str) -> None:
    model = made(name)
    other = fused(model)

    def mixer(each: Any) -> Any:
        return each.model.layers[0].mamba if name == "jamba" else each.backbone.layers[0].mixer

    changes = [
        lambda mixer: mixer.A_log.data.mul_(0.5),
        lambda mixer: mixer.D.data.mul_(2),
        lambda mixer: mixer.dt_proj.weight.data.mul_(-2),
        lambda mixer: setattr(mixer.dt_proj, "bias", nn.Parameter(mixer.dt_proj.bias.detach() + 1)),
        lambda mixer: mixer.conv1d.weight.data.mul_(2),
    ]
    if name != "mamba":
        changes += [
            lambda mixer: setattr(mixer.b_layernorm, "eps" if name == "falcon_mamba" else "variance_epsilon", 0.5),
            lambda mixer: mixer.c_layernorm.register_forward_hook(lambda module, args, y: 2 * y),
        ]
    for change in changes:
        before = logits(other, prompt())
        for each in (model, other):
            change(mixer(each))
        close(logits(other, prompt()), logits(model, prompt()))
        assert not torch.allclose(logits(other, prompt()), before)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_can_be_cropped(name: str, tmp_path: Any) -> None:
    """A second turn from a prefix, of a cache that was saved and loaded too, says what a whole prompt says."""
    other, ids = fused(made(name)), prompt(1, 20)
    of = cache_name(other)
    wanted = logits(other, ids)[:, -1]
    cache = lowbit.croppable_cache(other, every=4)
    with torch.no_grad():
        other(torch.cat([ids[:, :14], prompt(1, 3)], 1), **{of: cache}, use_cache=True)
        lowbit.save_cache(cache, tmp_path / "cache.safetensors")
        for held in (cache, lowbit.load_cache(other, tmp_path / "cache.safetensors")):
            left = lowbit.rewind_cache(held, 14)
            assert 10 < left <= 14
            close(other(ids[:, left:], **{of: held}, use_cache=True).logits[:, -1], wanted, BUDGET)
