# SPDX-License-Identifier: Apache-2.0
"""A change in a fused model between two calls counts, and so does one that takes it back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import answer, calls_of_layers, logits, made, prompt, transformers
from each_step import CALLING, at_each_step
from torch import nn

import lowbit
from lowbit.quant.fused_norm import FusedRMSNorm, norm_facts


def attention(model: nn.Module) -> nn.Module:
    return model.model.layers[1].self_attn


def mlp(model: nn.Module) -> nn.Module:
    return model.model.layers[1].mlp


class Doubling(nn.Linear):
    """A layer that is no QuantLinear."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__(like.in_features, like.out_features)
        nn.init.normal_(self.weight, std=0.05, generator=torch.Generator().manual_seed(5))
        nn.init.zeros_(self.bias)


def replaced(module: nn.Module, name: str) -> None:
    setattr(module, name, Doubling(getattr(module, name)))


def quantized_anew(module: nn.Module, name: str) -> None:
    """Another QuantLinear, of another format."""
    replaced(module, name)
    setattr(module, name, lowbit.QuantLinear.from_linear(getattr(module, name), lowbit.int8_weight_only().spec(torch.float32)))


def with_other_eps(module: nn.Module) -> None:
    setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", 3.0)


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, a, y: y * 2)


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "act_fn is another module": lambda model: setattr(mlp(model), "act_fn", nn.ReLU()),
    "act_fn is one that the op does not have": lambda model: setattr(mlp(model), "act_fn", nn.Tanh()),
    "act_fn computes something else": lambda model: setattr(mlp(model).act_fn, "forward", lambda x: x / 2),
    "act_fn is of another class": lambda model: setattr(mlp(model).act_fn, "__class__", Halved),
    "act_fn has a hook": lambda model: doubled(mlp(model).act_fn),
    **{f"{name} is a float layer": lambda model, name=name: replaced(mlp(model), name) for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"{name} is quantized anew": lambda model, name=name: quantized_anew(mlp(model), name) for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"{name} has a hook": lambda model, name=name: doubled(getattr(mlp(model), name)) for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"{name} is a float layer": lambda model, name=name: replaced(attention(model), name) for name in ("q_proj", "v_proj", "o_proj")},
    **{f"{name} is quantized anew": lambda model, name=name: quantized_anew(attention(model), name) for name in ("q_proj", "v_proj", "o_proj")},
    **{f"{name} has a hook": lambda model, name=name: doubled(getattr(attention(model), name)) for name in ("q_proj", "v_proj", "o_proj")},
    "another eps": lambda model: with_other_eps(model.model.layers[1].input_layernorm),
    "another eps of the last norm": lambda model: with_other_eps(model.model.norm),
    "another eps of heads": lambda model: with_other_eps(attention(model).q_norm),
    "no weight of a norm": lambda model: setattr(model.model.norm, "forward", lambda x: x),
    "another scale": lambda model: setattr(attention(model), "scaling", 1.0),
    "another soft cap": lambda model: setattr(attention(model), "attn_logit_softcapping", 1e-3),
    "every token sees all": lambda model: setattr(attention(model), "is_causal", False),
    "fewer layers": lambda model: setattr(model.model, "layers", model.model.layers[:2]),
    "a layer twice": lambda model: model.model.layers.__setitem__(1, model.model.layers[0]),
    "layers in another order": lambda model: setattr(model.model, "layers", nn.ModuleList(list(model.model.layers)[::-1])),
    "another norm": lambda model: setattr(model.model.layers[1], "input_layernorm", nn.Identity()),
    "another MLP": lambda model: setattr(model.model.layers[2], "mlp", nn.Identity()),
    "another o_proj": lambda model: setattr(model.model.layers[2].self_attn, "o_proj", nn.Linear(64, 64)),
    "other values of a norm": lambda model: model.model.layers[1].input_layernorm.weight.data.add_(1.0),
    "another bias": lambda model: setattr(model.model.layers[0].mlp.down_proj, "bias", nn.Parameter(torch.ones(64))),
    "a layer that changes its result": lambda model: model.model.layers[0].register_forward_hook(lambda m, a, y: y * 2),
    "a layer that changes its input": lambda model: model.model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "a hook of attention": lambda model: model.model.layers[1].self_attn.register_forward_hook(lambda m, a, y: (y[0] * 2, None)),
    "another forward": lambda model: setattr(model.model.layers[1], "forward", lambda x, **_: x * 2),
    "fewer layers by the configuration": lambda model: setattr(model.config, "num_hidden_layers", 1),
}  # fmt: skip
ONLY = {"another eps of heads": "qwen3", "another soft cap": "gemma2"}


@pytest.mark.parametrize("implementation", ["lowbit", "sdpa"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts(change: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "another soft cap":
        implementation = "eager" if implementation == "sdpa" else "lowbit"
    name = ONLY.get(change, "llama")
    model, other = (made(name, attention=implementation, num_hidden_layers=3) for _ in range(2))
    lowbit.fuse(model)
    before = logits(model, prompt())
    torch.testing.assert_close(before, logits(other, prompt()), rtol=1e-4, atol=1e-4)
    for changed in (model, other):
        torch.manual_seed(4)
        with torch.no_grad():
            CHANGES[change](changed)
    wanted = logits(other, prompt())
    assert not torch.allclose(wanted, before, atol=1e-4), "it changes nothing"
    for _ in range(2):
        torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
    if "layers" not in change and change != "a layer twice":  # whose caches have other indices
        assert torch.equal(answer(model, prompt()), answer(other, prompt()))


def test_what_is_changed_back_is_as_fast_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    lowbit.fuse(model)
    before, act_fn, scaling = logits(model, prompt()), mlp(model).act_fn, attention(model).scaling
    eps = model.model.layers[1].input_layernorm.variance_epsilon

    def change(to: nn.Module, scale: float, epsilon: float) -> None:
        mlp(model).act_fn, attention(model).scaling = to, scale
        model.model.layers[1].input_layernorm.variance_epsilon = epsilon

    for changes, in_calls in (  # another known activation is another program of the op
        ((nn.ReLU(), scaling, eps), [2, 2]),
        ((act_fn, 1.0, eps), [1, 2]),
        ((act_fn, scaling, 1.0), [1, 2]),
    ):
        change(*changes)
        with calls_of_layers(monkeypatch) as counts:
            assert not torch.allclose(logits(model, prompt()), before, atol=1e-3)
            change(act_fn, scaling, eps)
            assert torch.equal(logits(model, prompt()), before)
        assert counts == in_calls


def test_training_is_noticed_and_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of the attention weights, in some models of the MLP too, is of training alone."""
    model, other = (made("llama", attention="sdpa", attention_dropout=0.5).train() for _ in range(2))
    lowbit.fuse(model)
    for _ in range(2):
        results = []
        for one in (model, other):
            torch.manual_seed(1)
            results.append(logits(one.train(), prompt()))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits(model.eval(), prompt()), logits(other.eval(), prompt()), rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("lowbit")
    with calls_of_layers(monkeypatch) as counts:
        logits(model, prompt())
    assert counts == [2]


def test_copies_notice_their_own_changes() -> None:
    model = made("llama")
    lowbit.fuse(model)
    before, twin = logits(model, prompt()), copy.deepcopy(model)
    assert torch.equal(logits(twin, prompt()), before)
    mlp(twin).act_fn, attention(twin).scaling = nn.ReLU(), 0.1
    twin.model.norm.variance_epsilon = 1.0
    assert torch.equal(logits(model, prompt()), before)
    lowbit.quant.fused.unfuse(twin)
    mlp(twin).act_fn, attention(twin).scaling = mlp(model).act_fn, attention(model).scaling
    twin.model.norm.variance_epsilon = model.model.norm.variance_epsilon
    torch.testing.assert_close(logits(twin, prompt()), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "name"), [(nn.RMSNorm(16, eps=1e-3), "eps"), (transformers.models.llama.modeling_llama.LlamaRMSNorm(16), "variance_epsilon")]
)
@torch.no_grad()
def test_a_norm_has_the_eps_that_it_has_now(norm: nn.Module, name: str) -> None:
    norm, plain, x = norm.eval(), copy.deepcopy(norm), torch.randn(3, 16)
    FusedRMSNorm.take(norm, norm_facts(norm))
    for eps in (1e-3, 2.0, 1e-6):
        setattr(norm, name, eps), setattr(plain, name, eps)
        torch.testing.assert_close(norm(x), plain(x))
    if name == "eps":
        norm.weight = plain.weight = None
        torch.testing.assert_close(norm(x), plain(x))


@torch.no_grad()
def test_a_model_that_becomes_float_at_each_step_of_a_call() -> None:
    """In a prompt, and in a token behind it, whose keys must join the cache once."""
    model, ids = made("llama"), prompt()

    def call(model: nn.Module) -> list[torch.Tensor]:
        first = model(ids)
        return [first.logits, model(ids[:, :1], past_key_values=first.past_key_values).logits]

    wanted = call(model)
    lowbit.fuse(model)
    count = 0
    for got, _ in at_each_step(CALLING, call, lowbit.dequantize_, lambda: copy.deepcopy(model), every=23):
        count += 1
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert count > 20


def test_learned_numbers_of_an_activation_count() -> None:
    """Apertus's xIELU: its numbers are part of the program."""
    model, other = made("apertus"), made("apertus")
    lowbit.fuse(model)
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), rtol=1e-4, atol=1e-4)
    for each in (model, other):
        with torch.no_grad():
            each.model.layers[1].mlp.act_fn.alpha_p += 1.0
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), rtol=1e-4, atol=1e-4)
