# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse of Mamba-2 mixers: Mamba2, Bamba, Granite 4, Falcon-H1, Nemotron-H and Zamba2 say what they said before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import CONFIGS, answer, logits, prompt, transformers
from hybrids import BUDGET, close, padded, same_gradients
from torch import Tensor, nn

import lowbit
from lowbit.models import fused_mamba2
from lowbit.models.fused_mamba2 import FusedMamba2
from lowbit.quant.fused_gated_norm import FusedGatedNorm

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HEADS = dict(mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=24, mamba_chunk_size=8)
LIMIT = {"time_step_limit": (0.1, 0.9)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", dict(state_size=24, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, **LIMIT)),
    "bamba": ("Bamba", {**HEADS, **LIMIT, "attn_layer_indices": [1]}),
    "granite": ("GraniteMoeHybrid", {
        **HEADS, **LIMIT, **LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "mamba_proj_bias": True,
    }),
    "falcon_h1": ("FalconH1", {
        **HEADS, "mamba_d_ssm": 96, "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    }),
    "falcon_h1_norm": ("FalconH1", {**HEADS, "mamba_d_ssm": 96, "mamba_rms_norm": True}),
    "falcon_h1_gate_first": (
        "FalconH1", {**HEADS, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("NemotronH", dict(
        ssm_state_size=24, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, chunk_size=8, head_dim=16,
        time_step_min=0.3, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
    )),
    "zamba2": ("Zamba2", dict(
        mamba_d_state=24, n_mamba_heads=8, mamba_ngroups=2, chunk_size=8, time_step_min=0.3, num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
    )),
}  # fmt: skip


def made(name: str, **more: Any) -> nn.Module:
    kind, options = MODELS[name]
    sizes = {key: value for key, value in SIZES.items() if not (kind == "NemotronH" and key == "num_hidden_layers")}
    config = getattr(transformers, f"{kind}Config")(**sizes | options | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    for module in model.modules():  # norms are made of ones, biases of zeros, decays of 1 to 8
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 1 and key != "A_log":
                nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
            elif key == "A_log":
                nn.init.normal_(parameter, std=0.5)
    return model


def mixers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedMamba2)]


def fused(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    report = lowbit.fuse(other)
    assert mixers(other), report
    return other


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_answers_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    assert any(isinstance(module, FusedGatedNorm) for module in other.modules()) == (name != "falcon_h1")
    lengths = []
    op = fused_mamba2.ssd

    def counted(x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        lengths.append((x.shape[1], named.get("in_place", False)))
        return op(x, *given, **named)

    monkeypatch.setattr(fused_mamba2, "ssd", counted)
    of_tokens = seen.bool()
    close(logits(other, ids, attention_mask=seen)[of_tokens], logits(model, ids, attention_mask=seen)[of_tokens])
    close(logits(other, ids, use_cache=False), logits(model, ids, use_cache=False))
    assert torch.equal(answer(other, ids, attention_mask=seen), answer(model, ids, attention_mask=seen))
    prompts = 3 * len(mixers(other))  # logits, logits, and the prompt of the answer
    assert lengths[:prompts] == prompts * [(11, False)]
    assert set(lengths[prompts:]) == {(1, True)}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_that_of_transformers(name: str) -> None:
    """States have the layout and dtype that they had, so that either model goes on from the other's cache."""
    model = made(name)
    other, ids = fused(model), prompt(2, 12)
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    caches, ends = [], []
    for first, second in ((model, model), (model, other), (other, model)):
        begun = getattr(first(ids[:, :7], use_cache=True), argument)
        for part in (ids[:, 7:8], ids[:, 8:11]):
            second(part, **{argument: begun}, use_cache=True)
        ends.append(second(ids[:, 11:], **{argument: begun}, use_cache=True).logits)
        caches.append(begun)
    close(ends[1], ends[0])
    close(ends[2], ends[0])
    for one, two in zip(*(cache.layers for cache in caches[1:]), strict=True):
        for states in ("conv_states", "recurrent_states"):
            for mine, theirs in zip(getattr(one, states, {}).values(), getattr(two, states, {}).values(), strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.dtype == theirs.dtype
                    close(mine, theirs)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_bfloat16_rounds_no_more_than_transformers_does(name: str) -> None:
    wide, ids = made(name), prompt(2, 20)
    narrow = copy.deepcopy(wide).bfloat16()
    wanted, theirs, ours = (logits(model, ids).float() for model in (wide, narrow, fused(narrow)))
    assert (ours - wanted).norm() <= 1.2 * (theirs - wanted).norm()


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_models_say_the_same(config: str) -> None:
    model = made("bamba")
    lowbit.quantize_(model, CONFIGS[config])
    other, ids = fused(model), prompt()
    # An int8 activation that is on the edge may round to the next code.
    close(logits(other, ids), logits(model, ids), 2e-2 if config == "w4a8" else BUDGET)
    assert torch.equal(answer(other, ids), answer(model, ids))


def test_beams_and_the_lowbit_attention_go_on() -> None:
    model = made("bamba")
    other, (ids, seen) = fused(model), padded()
    other.set_attn_implementation("lowbit")
    beams = {"num_beams": 3, "attention_mask": seen}
    assert torch.equal(answer(other, ids, **beams), answer(model, ids, **beams))


@torch.no_grad()
def test_packed_sequences_are_kept_apart() -> None:
    """transformers does not keep them apart on a CPU."""
    model = fused(made("bamba"))
    mixer = mixers(model)[0]
    x, ends = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 5, 6, 12])
    y = mixer(x, cu_seq_lens_q=ends)
    close(y, torch.cat([mixer(x[:, i:j]) for i, j in zip(ends, ends[1:], strict=False)], dim=1))
    with pytest.raises(ValueError, match="Mamba-2: packed sequences .* without a cache"):
        mixer(x, cache_params=transformers.DynamicCache(config=model.config), cu_seq_lens_q=ends)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1_norm"])
def test_gradients_and_training_run_on_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    same_gradients(model, fused(model), monkeypatch, fused_mamba2, "ssd")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a projection": lambda mixer: mixer.in_proj.register_forward_hook(lambda module, args, y: 2 * y),
    "a limit": lambda mixer: setattr(mixer, "time_step_limit", (0.5, 0.6)),
    "A_log": lambda mixer: mixer.A_log.data.mul_(0.5),
    "eps of the norm": lambda mixer: setattr(mixer.norm, "variance_epsilon", 0.5),
    "another convolution": lambda mixer: mixer.conv1d.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_later_change_counts(change: Callable[[Any], Any]) -> None:
    model = made("bamba")
    other = fused(model)
    for each in (model, other):
        change(each.model.layers[0].mamba)
    close(logits(other, prompt()), logits(model, prompt()))


def test_modules_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    results = fused_mamba2.results_of
    monkeypatch.setattr(fused_mamba2, "results_of", lambda probe, hidden: tried.append(probe) or results(probe, hidden))
    model = made("mamba2")
    model.backbone.layers[1].mixer.time_step_limit = (0.2, 0.3)
    other, ids = fused(model), prompt()
    assert len(mixers(other)) == 3 and len(tried) == 4
    close(logits(other, ids), logits(model, ids))


def test_what_is_no_mixer_that_is_known_is_left_with_the_reason() -> None:
    model = made("mamba2")

    class Other(type(model.backbone.layers[0].mixer)):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.01 * super().forward(*args, **kwargs)

    model.backbone.layers[0].mixer.__class__ = Other
    model.backbone.layers[1].mixer.in_proj.register_forward_hook(lambda *_: None)
    model.backbone.layers[2].mixer.activation = "gelu"
    report = lowbit.fuse(model)
    assert report.left["backbone.layers.0.mixer"] == "its results are not those of ssd"
    assert report.left["backbone.layers.1.mixer"] == "hooks on in_proj"
    assert report.left["backbone.layers.2.mixer"] == "the activation of its convolution is gelu, not silu"
    assert "backbone.layers.2.mixer.norm" in report
