# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse of Mamba-1 mixers: Mamba, Falcon-Mamba and Jamba say what they said before."""

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
from lowbit.models import fused_mamba
from lowbit.models.fused_mamba import NOTE, FusedMamba
from lowbit.models.recurrent_layers import scanned

SIZES = dict(
    vocab_size=97, hidden_size=64, num_hidden_layers=3, pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", dict(state_size=16, intermediate_size=128, time_step_rank=6)),
    "mamba_biases": ("Mamba", dict(state_size=5, expand=1, time_step_rank=3, use_bias=True, use_conv_bias=False)),
    "falcon_mamba": ("FalconMamba", dict(state_size=16, intermediate_size=128, time_step_rank=6)),
    "jamba": ("Jamba", dict(
        mamba_d_state=16, mamba_dt_rank=6, mamba_expand=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, attn_layer_period=3, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        max_position_embeddings=128,
    )),
}  # fmt: skip


def made(name: str, **more: Any) -> nn.Module:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | options | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    for module in model.modules():  # norms are made of ones, biases of zeros, decays of 1 to 16
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
            elif key == "A_log":
                nn.init.normal_(parameter, std=0.5)
    return model


def mixers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedMamba)]


def fused(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    report = lowbit.fuse(other)
    assert mixers(other), report
    assert NOTE in report.notes
    return other


def cache_of(model: nn.Module, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    name = "past_key_values" if "Jamba" in type(model).__name__ else "cache_params"
    with torch.no_grad():
        result = model(ids, **{name: cache}, use_cache=True)
    return result.logits, getattr(result, name)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_answers_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    other, (ids, seen) = fused(model), padded()
    lengths = []
    op = fused_mamba.selective_scan

    def counted(x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        lengths.append((x.shape[1], named.get("in_place", False)))
        return op(x, *given, **named)

    monkeypatch.setattr(fused_mamba, "selective_scan", counted)
    of_tokens = seen.bool()
    close(logits(other, ids, attention_mask=seen)[of_tokens], logits(model, ids, attention_mask=seen)[of_tokens])
    close(logits(other, ids, use_cache=False), logits(model, ids, use_cache=False))
    assert torch.equal(answer(other, ids, attention_mask=seen), answer(model, ids, attention_mask=seen))
    prompts = 3 * len(mixers(other))  # logits, logits, and the prompt of the answer
    assert lengths[:prompts] == prompts * [(11, False)]
    assert set(lengths[prompts:]) == {(1, True)}


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_that_of_transformers(name: str) -> None:
    """States have the layout and dtype that they had, so that either model goes on from the other's cache."""
    model = made(name)
    other, ids = fused(model), prompt(2, 10)
    caches, ends = [], []
    for first, second in ((model, model), (model, other), (other, model)):
        _, begun = cache_of(first, ids[:, :8])
        for i in (8, 9):
            last, begun = cache_of(second, ids[:, i : i + 1], begun)
        ends.append(last)
        caches.append(begun)
    close(ends[1], ends[0])
    close(ends[2], ends[0])
    for one, two in zip(*(cache.layers for cache in caches[1:]), strict=True):
        for states in ("conv_states", "recurrent_states"):
            for mine, theirs in zip(getattr(one, states, {}).values(), getattr(two, states, {}).values(), strict=True):
                assert mine.dtype == theirs.dtype
                close(mine, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_parts_is_one_prompt(name: str) -> None:
    """transformers begins with a state of zeros in each part."""
    model, ids = made(name), prompt(2, 12)
    other = fused(model)
    begun, outs = None, []
    for part in ids.split([5, 4, 3], dim=1):
        out, begun = cache_of(other, part, begun)
        outs.append(out)
    close(torch.cat(outs, dim=1), logits(model, ids))


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_bfloat16_rounds_no_more_than_transformers_does(name: str) -> None:
    wide, ids = made(name), prompt(2, 20)
    narrow = copy.deepcopy(wide).bfloat16()
    wanted, theirs, ours = (logits(model, ids).float() for model in (wide, narrow, fused(narrow)))
    assert (ours - wanted).norm() <= 1.2 * (theirs - wanted).norm()


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_models_say_the_same(config: str) -> None:
    model = made("jamba")
    lowbit.quantize_(model, CONFIGS[config])
    other, ids = fused(model), prompt()
    # An int8 activation that is on the edge may round to the next code.
    close(logits(other, ids), logits(model, ids), 2e-2 if config == "w4a8" else BUDGET)
    assert torch.equal(answer(other, ids), answer(model, ids))


def test_beams_and_the_lowbit_attention_go_on() -> None:
    model = made("jamba")
    other, (ids, seen) = fused(model), padded()
    other.set_attn_implementation("lowbit")
    beams = {"num_beams": 3, "attention_mask": seen}
    assert torch.equal(answer(other, ids, **beams), answer(model, ids, **beams))


@torch.no_grad()
def test_packed_sequences_are_kept_apart() -> None:
    """transformers does not keep them apart on a CPU."""
    model = fused(made("jamba"))
    mixer = mixers(model)[0]
    x, ends = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 5, 6, 12])
    y = mixer(x, cu_seq_lens_q=ends)
    close(y, torch.cat([mixer(x[:, i:j]) for i, j in zip(ends, ends[1:], strict=False)], dim=1))
    with pytest.raises(ValueError, match="Mamba: packed sequences .* without a cache"):
        mixer(x, cache_params=transformers.DynamicCache(config=model.config), cu_seq_lens_q=ends)


@pytest.mark.parametrize("name", ["falcon_mamba", "jamba"])
def test_gradients_and_training_run_on_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    same_gradients(model, fused(model), monkeypatch, fused_mamba, "selective_scan")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a projection": lambda mixer: mixer.in_proj.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook on a norm": lambda mixer: mixer.b_layernorm.register_forward_hook(lambda module, args, y: 2 * y),
    "A_log": lambda mixer: mixer.A_log.data.mul_(0.5),
    "eps of a norm": lambda mixer: setattr(mixer.dt_layernorm, "variance_epsilon", 0.5),
    "another convolution": lambda mixer: mixer.conv1d.weight.data.mul_(0.5),
    "steps of time": lambda mixer: mixer.dt_proj.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_later_change_counts(change: Callable[[Any], Any]) -> None:
    model = made("jamba")
    other = fused(model)
    for each in (model, other):
        change(each.model.layers[0].mamba)
    close(logits(other, prompt()), logits(model, prompt()))


def test_modules_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    results = fused_mamba.results_of
    monkeypatch.setattr(
        fused_mamba, "results_of", lambda probe, *given, **named: tried.append(probe) or results(probe, *given, **named)
    )
    other = fused(made("mamba"))
    assert len(mixers(other)) == 3 and len(tried) == 2


def test_what_is_no_mixer_that_is_known_is_left_with_the_reason() -> None:
    model = made("mamba")

    class Other(type(model.backbone.layers[0].mixer)):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.01 * super().forward(*args, **kwargs)

    model.backbone.layers[0].mixer.__class__ = Other
    model.backbone.layers[1].mixer.in_proj.register_forward_hook(lambda *_: None)
    model.backbone.layers[2].mixer.activation = "gelu"
    report = lowbit.fuse(model)
    assert report.left["backbone.layers.0.mixer"] == "its results are not those of selective_scan"
    assert report.left["backbone.layers.1.mixer"] == "hooks on in_proj"
    assert report.left["backbone.layers.2.mixer"] == "the activation of its convolution is gelu, not silu"
    model = made("mamba")
    model.backbone.layers[0].mixer.dt_proj = nn.Sequential(model.backbone.layers[0].mixer.dt_proj)
    assert lowbit.fuse(model).left["backbone.layers.0.mixer"] == "its dt_proj is Sequential, no torch.nn.Linear"


@pytest.mark.parametrize("adapters_first", [False, True])
def test_lora_trains_on_the_op(adapters_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed projections too, be the adapters added before or behind."""
    peft = pytest.importorskip("peft")
    plain = made("jamba")
    lowbit.quantize_(plain, lowbit.int8_weight_only())

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["in_proj", "x_proj", "out_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    other = copy.deepcopy(plain)
    model = adapted(plain)
    for step in (adapted, lowbit.fuse) if adapters_first else (lowbit.fuse, adapted):
        result = step(other)
        other = result if step is adapted else other
    assert mixers(other)
    same_gradients(model, other, monkeypatch, fused_mamba, "selective_scan")
    assert all(
        parameter.grad.any() for name, parameter in other.named_parameters() if "lora" in name and "mamba" in name
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cache_of_any_dtype_gets_the_new_state(dtype: torch.dtype) -> None:
    """Of float16 and float64 the ops take a copy in float32."""

    class Cache:
        layers = (None,)
        state = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

        def get_recurrent_state(self, index: int) -> torch.Tensor:
            return self.state

        def update_recurrent_state(self, state: torch.Tensor, index: int) -> None:
            self.state = state.to(self.state.dtype)

    torch.manual_seed(1)
    x, dt, A, B, C = torch.randn(1, 3, 16), torch.rand(1, 3, 16), -torch.rand(16, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    cache, before = Cache(), Cache.state.clone()
    y = scanned(lowbit.selective_scan, (x, dt, A, B, C), {}, cache, 0)
    wanted, state = lowbit.selective_scan(x, dt, A, B, C, state=before.float())
    assert torch.equal(y, wanted) and torch.equal(cache.state, state.to(dtype)) and not torch.equal(cache.state, before)
