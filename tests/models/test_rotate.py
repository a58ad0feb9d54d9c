# SPDX-License-Identifier: Apache-2.0
"""lowbit.rotate_: what a model computes is kept, its stream is turned, and what does not fit is refused as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import MODELS, answer, in_float, logits, prompt, transformers
from torch import Tensor, nn

import lowbit

FIT = {name: MODELS[name] for name in ("llama", "llama_biased", "mistral", "qwen2", "qwen3", "phi3", "granite")} | {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {}),  # tied, and gains are 1 + weight
    "smollm3": ("SmolLM3", {}),
    "width 36": ("Llama", {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}),
    "odd width": ("Qwen3", {"hidden_size": 57, "head_dim": 10}),
}


def model_of(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """Random weights that are large enough for attention to choose."""
    model = in_float(*(FIT | MODELS)[name], "eager", **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8 if parameter.dim() > 1 else 1
    return model.to(dtype)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("name", FIT)
def test_the_model_computes_what_it_did(name: str, kind: str) -> None:
    model = model_of(name, torch.float64)
    wanted, parameters = logits(model, prompt()), dict(model.named_parameters())
    report = lowbit.rotate_(model, kind)
    assert distance(logits(model, prompt()), wanted) < 1e-5  # norms of transformers compute in float32
    assert report.difference < 1e-5 and kind in repr(report)
    now = dict(model.named_parameters())
    assert all(now[key] is parameters[key] for key in parameters)
    for norm in (module for name, module in model.named_modules() if name.endswith("layernorm")):
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.0 if name == "gemma" else 1.0))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_dtypes_are_kept(dtype: torch.dtype, tolerance: float) -> None:
    model = model_of("qwen2", dtype)
    wanted = logits(model, prompt()).double()
    report = lowbit.rotate_(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert distance(logits(model, prompt()).double(), wanted) < tolerance and report.difference < tolerance


def test_the_stream_is_turned_by_the_matrix_of_the_report() -> None:
    def states(of: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return of(prompt(), output_hidden_states=True).hidden_states[:-1]  # the last one is behind the norm

    model = model_of("llama", torch.float64)
    turned = copy.deepcopy(model)
    report = lowbit.rotate_(turned, heads=False)
    assert report.heads is None
    for got, wanted in zip(states(turned), states(model), strict=True):
        assert distance(got, wanted @ report.stream.matrix()) < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "phi3"])  # values of their own, with a bias; packed with queries and keys
def test_values_of_heads_are_turned(name: str) -> None:
    def values(of: nn.Module) -> Tensor:
        cache = transformers.DynamicCache(config=of.config)
        logits(of, prompt(), past_key_values=cache)
        return cache.layers[1].values

    model = model_of(name, torch.float64)
    turned = copy.deepcopy(model)
    report = lowbit.rotate_(turned)
    assert distance(values(turned), values(model) @ report.heads.matrix()) < 1e-5


def test_outliers_are_spread() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 50
        model.model.layers[0].input_layernorm.weight[7] *= 40

    def peak(weight: Tensor) -> float:
        return float((weight.abs().amax(1) / weight.square().mean(1).sqrt()).nanmean())  # the row of padding is 0

    weights = (model.model.embed_tokens.weight, model.model.layers[0].self_attn.q_proj.weight)
    before = peak(weights[0].detach())
    lowbit.rotate_(model)
    assert before > 7 and all(peak(weight.detach()) < 4 for weight in weights)


@pytest.mark.parametrize("name", ["tied", "gemma"])
def test_a_tied_head_gets_its_own_weight(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    wanted = logits(model, prompt())
    report = lowbit.rotate_(model)
    assert report.untied and "untied" in repr(report) and not model.config.tie_word_embeddings
    model.tie_weights()  # what transformers does after loading and resizing
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert distance(logits(again, prompt()), wanted) < 1e-5
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert distance(logits(copy.deepcopy(model), prompt()), wanted) < 1e-5


def test_equal_gains_of_the_last_norm_leave_a_head_tied(tmp_path: Path) -> None:
    model = model_of("tied")
    nn.init.constant_(model.model.norm.weight, 0.7)
    wanted = logits(model, prompt())
    report = lowbit.rotate_(model)
    assert not report.untied and model.lm_head.weight is model.model.embed_tokens.weight
    assert distance(logits(model, prompt()), wanted) < 1e-5 and model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert distance(logits(again, prompt()), wanted) < 1e-5


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3"])
def test_quantized_and_fused_afterwards(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.set_attn_implementation("lowbit")
    lowbit.rotate_(model)
    wanted = logits(model, prompt())
    lowbit.quantize_(model, lowbit.int8_weight_only())
    assert distance(logits(model, prompt()), wanted) < 0.05
    tokens = answer(model, prompt())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    report = lowbit.fuse(model)
    assert "model" in report and torch.equal(answer(model, prompt()), tokens)
    fresh = model_of(name)
    if name == "tied":
        fresh.lm_head.weight = nn.Parameter(fresh.lm_head.weight.detach().clone())
    lowbit.load(fresh, tmp_path / "model.pt")
    assert torch.equal(answer(fresh, prompt()), tokens)


def test_a_model_is_turned_twice() -> None:
    model = model_of("llama", torch.float64)
    wanted = logits(model, prompt())
    lowbit.rotate_(model, "orthogonal", seed=3, heads=False)
    lowbit.rotate_(model)
    assert distance(logits(model, prompt()), wanted) < 1e-5


def test_training_mode_and_what_takes_gradients_stay() -> None:
    model = model_of("llama").train()
    model.model.norm.weight.requires_grad_(False)
    model(prompt()).logits.sum().backward()
    lowbit.rotate_(model)
    assert model.training and model.model.layers[0].mlp.training
    assert not model.model.norm.weight.requires_grad and model.lm_head.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


class Doubled(nn.Linear):
    pass


def cut_channels(model: nn.Module) -> None:
    """Cut a layer's part of the stream channel by channel; nothing of its pieces says so."""
    mlp = model.model.layers[1].mlp
    forward = type(mlp).forward
    mlp.__class__ = type("Other", (type(mlp),), {"forward": lambda self, x: forward(self, x).relu()})


def adapted(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "quantized": (lambda model: lowbit.quantize_(model, lowbit.int8_weight_only()), "lm_head must be float, got int8"),
    "one quantized layer": (
        lambda model: lowbit.quantize_(model.model.layers[1].mlp, lowbit.int8_weight_only()),
        r"model.layers.1.mlp.gate_proj must be float, got int8.*: call rotate_ before quantize_",
    ),
    "an adapter": (adapted, "without adapters of peft"),
    "a hook": (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None), "got one on model.layers.1.mlp"),
    "another forward": (lambda model: setattr(model.model.norm, "forward", lambda x: x), "got one on model.norm|model.norm must be"),
    "LayerNorm": (lambda model: setattr(model.model.layers[0], "input_layernorm", nn.LayerNorm(64)), "model.layers.0.input_layernorm must be an RMSNorm of 64 channels, got LayerNorm"),
    "a subclass": (lambda model: setattr(model.model.layers[0].mlp, "up_proj", Doubled(64, 96)), "model.layers.0.mlp.up_proj must be an nn.Linear, got Doubled"),
    "another piece": (lambda model: setattr(model.model.layers[0].mlp, "gate", nn.Linear(64, 2)), "model.layers.0.mlp.gate.weight must be of a norm or linear layer that is known, got Linear"),
    "a shared layer": (lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp), "model.layers.0.mlp.gate_proj.weight must belong to one layer, got model.layers.1.mlp.gate_proj.weight too"),
    "a shared weight": (lambda model: setattr(model.model.layers[1].mlp.up_proj, "weight", model.model.layers[1].mlp.gate_proj.weight), "must belong to one layer"),
    "the meta device": (lambda model: model.to("meta"), "must be on the cpu, got device='meta'"),
    "a missing piece": (lambda model: delattr(model.model.layers[1].mlp, "down_proj"), "model.layers.1.mlp.down_proj must be there"),
    "inf": (lambda model: model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.inf), "logits of the model must be finite"),
    "channels that are cut": (cut_channels, "must compute the same with the new weights"),
    "max_norm": (lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0), "model.embed_tokens must be without max_norm"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_refused_before_anything_changes(change: str) -> None:
    model = model_of("llama")
    make, message = CHANGES[change]
    make(model)
    before = state(model)
    with pytest.raises(ValueError, match=f"rotate_: .*({message})"):
        lowbit.rotate_(model)
    assert change == "the meta device" or same(model, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name, message",
    [
        ("gemma2", "model.layers.0 must have norms in front of attention and MLP alone, got post_feedforward_layernorm"),
        ("gemma3", "got post_feedforward_layernorm"),
        ("cohere", "model.layers.0.input_layernorm must be an RMSNorm of 64 channels, got CohereLayerNorm"),
        ("stablelm", "model.layers.0.input_layernorm must be an RMSNorm of 64 channels, got LayerNorm"),
    ],
)
def test_other_architectures_are_refused(name: str, message: str) -> None:
    model = model_of(name)
    before = state(model)
    with pytest.raises(ValueError, match=f"rotate_: .*{message}"):
        lowbit.rotate_(model)
    assert same(model, before)


def test_a_failure_in_the_check_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tied")
    before, calls = state(model), []
    forward = nn.functional.linear

    def failing(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 20:
            raise MemoryError("no more")
        return forward(*args)

    parameters = dict(model.named_parameters())
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", failing)
        with pytest.raises(MemoryError):
            lowbit.rotate_(model)
    assert same(model, before) and dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_weights_that_float16_does_not_hold_are_refused() -> None:
    model = model_of("llama", torch.float16)
    model.model.layers[1].input_layernorm.weight.data.fill_(6e4)
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(2.0)
    before = state(model)
    with pytest.raises(ValueError, match=r"the new model.layers.1.self_attn.k_proj.weight must be finite in torch.float16"):
        lowbit.rotate_(model)
    assert same(model, before)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(TypeError, match="rotate_: model must be a torch.nn.Module, got int"):
        lowbit.rotate_(3)
    for model in (nn.Sequential(nn.Linear(4, 4)), model_of("llama").model):
        with pytest.raises(ValueError, match=r"rotate_: model must be a language model with an output head"):
            lowbit.rotate_(model)
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="rotate_: model must have one list of decoder layers with self_attn and mlp, got none"):
        lowbit.rotate_(transformers.GPT2LMHeadModel(config))


def test_arguments() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="rotate_: kind must be one of hadamard, orthogonal, got 'random'"):
        lowbit.rotate_(model, "random")
    with pytest.raises(TypeError, match="rotate_: seed must be an int, got float"):
        lowbit.rotate_(model, seed=1.5)
    integers = model_of("llama")
    integers.model.norm.weight = nn.Parameter(torch.ones(64, dtype=torch.int32), requires_grad=False)
    with pytest.raises(TypeError, match="rotate_: model.norm.weight must be float32, bfloat16, float16 or float64, got torch.int32"):
        lowbit.rotate_(integers)


def test_norms_that_were_fused_are_turned_too() -> None:
    model = model_of("llama")
    wanted = logits(model, prompt())
    assert "model.norm" in lowbit.fuse(model)
    lowbit.rotate_(model)
    assert distance(logits(model, prompt()), wanted) < 1e-5
