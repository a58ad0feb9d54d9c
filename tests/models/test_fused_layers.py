# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in one call: which are, that whatever changes later counts, and that nothing else sees a difference."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from decoders import MODELS, answer, calls_of_layers, logits, made, prompt, transformers
from torch import Tensor, nn

import lowbit


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    report = lowbit.fuse(model)
    with calls_of_layers(monkeypatch) as counts:
        answer(model, prompt(), max_new_tokens=4)
    assert counts == [2] * 4 and {"model", "gpt_neox"} & set(report)


def test_the_list_of_layers_is_what_it_was_outside_of_a_call() -> None:
    model = made("llama")
    layers = list(model.model.layers)
    lowbit.fuse(model)
    seen = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(len(list(model.model.layers))))
    logits(model, prompt())
    assert seen == [2]  # inside of one too
    assert list(model.model.layers) == layers and model.model.layers[1] is layers[1] and len(model.model.layers) == 2
    part = model.model.layers[1:]
    assert type(part) is nn.ModuleList and list(part) == layers[1:]
    model.model.layers.append(made("llama").model.layers[0])
    assert len(list(model.model.layers)) == 3


def test_hidden_states_that_a_model_collects_itself() -> None:
    class Collecting(transformers.LlamaModel):
        def forward(self, *args: Any, output_hidden_states: bool = False, **kwargs: Any) -> Any:
            collected = []
            handles = [layer.register_forward_hook(lambda m, a, y: collected.append(y)) for layer in self.layers] if output_hidden_states else []
            result = super().forward(*args, **kwargs)
            for handle in handles:
                handle.remove()
            return collected if output_hidden_states else result

    model = made("llama")
    model.model.__class__ = Collecting
    with torch.no_grad():
        wanted = model.model(prompt(), output_hidden_states=True)
        assert "model" in lowbit.fuse(model)
        got = model.model(prompt(), output_hidden_states=True)
    assert len(got) == len(wanted) == 2
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_hidden_states_that_transformers_records() -> None:
    """It finds what a model can record by the text of its class."""
    model, other = made("llama"), made("llama")
    assert "model" in lowbit.fuse(model)
    for _ in range(2):
        got, wanted = (logits_and_hidden_states(each) for each in (model, other))
        assert len(got) == len(wanted) == 4
        for one, its in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, its, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits_and_hidden_states(model: nn.Module) -> list[Tensor]:
    said = model(prompt(), output_hidden_states=True)
    return [said.logits, *said.hidden_states]


class TwoResults(transformers.LlamaModel):
    """Its result is made of those of all layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen = []
        handles = [layer.register_forward_hook(lambda m, a, y: seen.append(y)) for layer in self._modules["layers"]._modules.values()]
        result = super().forward(*args, **kwargs)
        for handle in handles:
            handle.remove()
        result.last_hidden_state = sum(seen)
        return result


def test_a_model_that_uses_what_each_layer_returns_is_left() -> None:
    model = made("llama")
    model.model.__class__ = TwoResults
    wanted = logits(model, prompt())
    assert "model" in lowbit.fuse(model).left
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)


class SomeLayers(transformers.LlamaModel):
    """It calls another number of its layers, or in another order, for long prompts."""

    order = slice(0, 1)

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if input_ids is None or input_ids.shape[1] < 20:
            return super().forward(input_ids, **kwargs)
        x = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in list(self.layers)[self.order]:
            x = layer(x, attention_mask=None, position_embeddings=embeddings)
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(x))


@pytest.mark.parametrize("order", [slice(0, 1), slice(None, None, -1)], ids=["fewer", "backwards"])
def test_a_model_that_does_not_call_its_layers_in_turn_is_an_error(order: slice) -> None:
    model = made("llama")
    model.model.__class__, model.model.order = SomeLayers, order
    assert "model" in lowbit.fuse(model)
    wanted = logits(model, prompt())
    with pytest.raises(RuntimeError, match="does not hand the result of each layer to the next|on device meta"):
        logits(model, prompt(1, 20))
    assert torch.equal(logits(model, prompt()), wanted)
    model.train()  # each layer is called by itself
    assert logits(model, prompt(1, 20)).isfinite().all()


def test_a_call_that_fails_leaves_no_trace() -> None:
    model = made("llama")
    lowbit.fuse(model)
    wanted, cache = logits(model, prompt()), transformers.DynamicCache(config=model.config)
    logits(model, prompt(), past_key_values=cache)
    with pytest.raises(Exception, match="ten of them"):
        model.model.norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("ten of them")))
        logits(model, prompt())
    model.model.norm._forward_pre_hooks.clear()
    mask = torch.ones(2, 1, 9, 5, dtype=torch.bool)  # of another number of keys
    with pytest.raises(ValueError, match="mask"):
        logits(model, prompt(), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 9
    assert torch.equal(logits(model, prompt()), wanted)


def test_threads_that_share_a_model() -> None:
    model = made("llama")
    lowbit.fuse(model)
    wanted = [answer(model, prompt(1, length)) for length in range(3, 9)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda length: answer(model, prompt(1, length)), range(3, 9)))
    assert all(map(torch.equal, got, wanted))


def test_a_compiled_model_says_the_same() -> None:
    model = made("llama")
    wanted = logits(model, prompt())
    lowbit.fuse(model)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, prompt()), wanted, rtol=1e-4, atol=1e-4)


def test_attention_weights_are_still_refused() -> None:
    model = made("llama")
    lowbit.fuse(model)
    with pytest.raises(NotImplementedError, match="never holds the attention weights"):
        logits(model, prompt(), output_attentions=True)


def test_one_call_again_when_a_hook_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama", num_hidden_layers=3)
    lowbit.fuse(model)
    for hooked in (model.model.layers[1].mlp.down_proj, model.model.layers[2].self_attn.o_proj):
        handle = hooked.register_forward_hook(lambda *_: None)
        with calls_of_layers(monkeypatch) as counts:
            logits(model, prompt())
            handle.remove()
            logits(model, prompt())
        assert counts == [1, 1, 3]


def test_a_model_is_freed_when_its_last_name_is_gone() -> None:
    """The kept part of a call refers to no layer that holds it: the weights would wait for the garbage collector."""
    model = made("llama")
    lowbit.fuse(model)
    answer(model, prompt())
    seen = [weakref.ref(module) for module in (model.model, *model.model.layers)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()


def test_decoders_that_share_a_layer() -> None:
    one, other = made("llama"), made("llama")
    for module in other.modules():
        if isinstance(module, lowbit.QuantLinear):
            module.weight.data = module.weight.data.roll(1, 0)
    other.model.layers[0] = one.model.layers[0]
    wanted = [logits(model, prompt()) for model in (one, other)]
    assert "model" in lowbit.fuse(one) and "model" in lowbit.fuse(other)
    for _ in range(2):
        for model, said in zip((one, other), wanted, strict=True):
            torch.testing.assert_close(logits(model, prompt()), said, rtol=1e-4, atol=1e-4)


def one_layer_twice(model: nn.Module) -> None:
    model.model.layers[1] = model.model.layers[0]


def one_place_for_two(model: nn.Module) -> None:
    model.model.layers[1].self_attn.layer_idx = 0


@pytest.mark.parametrize("change", [one_layer_twice, one_place_for_two])
@pytest.mark.parametrize("first", ["the change", "fuse"])
def test_layers_that_share_a_layer_of_the_cache_answer_as_unfused(first, change):
    model, ids = made("llama"), prompt()
    fused = copy.deepcopy(model)
    change(model)
    for step in (change, lowbit.fuse) if first == "the change" else (lowbit.fuse, change):
        pieces = step(fused)
    if first == "the change":
        assert pieces.left["model"] == "two of its layers write to one layer of the cache (layer_idx)"
    for length in (9, 1):
        wanted, got = (outputs(each, ids[:, :length]) for each in (model, fused))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def outputs(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of a prompt, and of a token behind it."""
    first = model(ids, use_cache=True)
    return [first.logits, model(ids[:, :1], past_key_values=first.past_key_values).logits]
