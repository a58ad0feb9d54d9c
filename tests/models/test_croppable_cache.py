# SPDX-License-Identifier: Apache-2.0
"""Caches of hybrids that are cropped and rewound, beside runs from the beginning."""

from __future__ import annotations

import functools

import pytest
import torch
from croppable_hybrids import ASKED, CONFIGS, PROMPT, distance, fused, logits, recurrent
from gguf_files import transformers
from gguf_hybrids import model_of

import lowbit
from lowbit.models.growing_cache import GrowingLayer

ONE_CALL = ["gated delta net", "Mamba-2", "short convolution", "projections by head", "side by side", "halves"]
"""Models whose layers are one call, which assisted decoding wants."""


@pytest.mark.parametrize("name", ONE_CALL)
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(name):
    model = fused(name)
    wanted = model.generate(PROMPT, max_new_tokens=24, **ASKED)
    cache = lowbit.croppable_cache(model, every=16)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, prompt_lookup_num_tokens=5, max_new_tokens=24, **ASKED), wanted)
    assert {layer.length for layer in recurrent(cache)} == {wanted.shape[1] - 1}
    assert model._is_stateful == type(model)._is_stateful


def test_an_assistant_may_draft():
    model = fused("gated delta net")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    torch.manual_seed(0)
    assistant = transformers.AutoModelForCausalLM.from_config(config).eval()
    wanted = model.generate(PROMPT, max_new_tokens=16, **ASKED)
    cache = lowbit.croppable_cache(model)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, assistant_model=assistant, max_new_tokens=16, **ASKED), wanted)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(PROMPT, assistant_model=assistant, max_new_tokens=16, **ASKED)


@pytest.mark.parametrize("left", [1, 7, 15, 16, 17, 31, 32, 33, 36])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_follows_a_crop_is_what_follows_the_prefix(name, left):
    """In prompts of one call, of which all of the last 16 tokens can be taken out one by one."""
    model = fused(name, packed=False)
    cache, fresh = lowbit.croppable_cache(model, every=16), lowbit.croppable_cache(model, every=16)
    logits(model, PROMPT, cache)
    kept = lowbit.rewind_cache(cache, left)
    assert kept == (left if left >= 16 else 0)
    assert {layer.length for layer in recurrent(cache)} == {kept}
    assert all(layer.get_seq_length() == kept for layer in cache.layers if isinstance(layer, GrowingLayer))
    if kept:
        logits(model, PROMPT[:, :kept], fresh)
    more = torch.arange(5, 12)[None]
    assert distance(logits(model, more, cache), logits(model, torch.cat([PROMPT[:, :kept], more], 1))[:, kept:]) < 1e-4
    assert distance(logits(model, more, fresh), logits(model, torch.cat([PROMPT[:, :kept], more], 1))[:, kept:]) < 1e-4


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_second_turn_computes_at_most_every_tokens_again(name, monkeypatch):
    """The answer of the first turn is computed by a program, which keeps no inputs."""
    model = fused(name)
    cache = lowbit.croppable_cache(model, every=16)
    said = model.generate(PROMPT, past_key_values=cache, max_new_tokens=30, **ASKED)
    assert recurrent(cache)[0].length == 65
    shared = 60
    second = torch.cat([said[:, :shared], torch.tensor([[9, 4, 11]])], 1)
    left = lowbit.rewind_cache(cache, shared)
    assert shared - 16 < left <= shared
    computed = []
    forward = type(model).forward

    @functools.wraps(forward)  # whose signature generate looks at
    def counted(self, input_ids=None, **kwargs):
        computed.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    asked = ASKED | dict(attention_mask=torch.ones_like(second), max_new_tokens=6)  # the answer may have the token of padding
    ours = model.generate(second, past_key_values=cache, **asked)
    assert computed[0] == second.shape[1] - left
    assert torch.equal(ours, model.generate(second, **asked))


@pytest.mark.parametrize("name", ["Mamba-2", "side by side"])
def test_beams_take_the_states_of_their_rows(name):
    model = fused(name)
    asked = ASKED | dict(max_new_tokens=12, num_beams=3)
    cache = lowbit.croppable_cache(model, every=16)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **asked), model.generate(PROMPT, **asked))


@pytest.mark.parametrize("name", ["gated delta net", "Mamba-2", "Mamba-1", "side by side"])
def test_states_in_bfloat16_take_half_of_the_memory_and_say_nearly_the_same(name):
    """Of a prompt, of tokens that a program computes, and behind a crop. Each state is rounded to 8 bits."""
    model = fused(name)
    caches = [lowbit.croppable_cache(model, every=16, state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]

    def states():
        return [[state for layer in recurrent(cache) for kept in layer.states().values() for state in kept[1:]] for cache in caches]

    def compare(tokens):
        wide, narrow = (logits(model, tokens, cache) for cache in caches)
        assert 0 < distance(narrow, wide) < 2e-2
        wanted, held = states()
        assert {state.dtype for state in held} == {torch.bfloat16} and {state.dtype for state in wanted} == {torch.float32}
        assert 2 * sum(state.nbytes for state in held) == sum(state.nbytes for state in wanted)
        assert all(distance(ours.float(), theirs) < 2e-2 for ours, theirs in zip(held, wanted, strict=True))

    for cache in caches:
        logits(model, PROMPT, cache)
    for token in range(3):
        compare(torch.tensor([[token + 5]]))
    assert len({lowbit.rewind_cache(cache, 35) for cache in caches}) == 1
    compare(torch.arange(5, 12)[None])


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_crop_between_kept_states_is_refused_and_changes_nothing():
    model = fused("gated delta net")
    cache = lowbit.croppable_cache(model, every=16)
    model.generate(PROMPT, past_key_values=cache, max_new_tokens=30, **ASKED)
    before = [layer.states() for layer in recurrent(cache)]
    with pytest.raises(ValueError, match=r"crop: the states of 60 tokens must be kept, got none between 48 and 60 tokens: .*rewind_cache\(cache, 60\) goes back to 48"):
        recurrent(cache)[0].crop(-5)
    assert all(torch.equal(a, b) for layer, states in zip(recurrent(cache), before, strict=True) for at, kept in states.items() for a, b in zip(layer.states()[at], kept, strict=True))
    with pytest.raises(ValueError, match="crop: tokens_to_remove must be from -65 to 0, got -66"):
        recurrent(cache)[0].crop(-66)


def test_layers_that_are_not_fused_are_refused():
    model = model_of("gated delta net", CONFIGS["gated delta net"])
    model.set_attn_implementation("lowbit")
    with pytest.raises(RuntimeError, match="a croppable cache is written by fused layers"):
        logits(model, PROMPT, lowbit.croppable_cache(model))


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_every_must_be_a_number_of_tokens(every):
    with pytest.raises(ValueError, match="croppable_cache: every must be a number of tokens from 1 on, got"):
        lowbit.croppable_cache(model_of("lfm2"), every)


def test_states_have_one_of_two_dtypes():
    with pytest.raises(ValueError, match="croppable_cache: state_dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        lowbit.croppable_cache(model_of("lfm2"), state_dtype=torch.float16)


@pytest.mark.parametrize(("name", "told"), [("falcon-h1", "a LinearAttentionAndFullAttentionLayer for layer 0"), ("lfm2", "a DynamicLayer for layer 2")])
def test_layers_whose_states_cannot_be_kept_are_named(name, told):
    with pytest.raises(ValueError, match=f"croppable_cache: model must have layers of recurrent states .* got {told}"):
        lowbit.croppable_cache(model_of(name))


def test_a_model_without_recurrent_layers_is_refused():
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lowbit")
    with pytest.raises(ValueError, match="croppable_cache: model must have recurrent layers with one state each, got none"):
        lowbit.croppable_cache(model)


def test_other_caches_are_refused():
    model = fused("short convolution")
    with pytest.raises(ValueError, match="rewind_cache: cache must be one of lowbit.croppable_cache, got a DynamicCache"):
        lowbit.rewind_cache(transformers.DynamicCache(config=model.config), 0)
    with pytest.raises(ValueError, match="rewind_cache: length must be from 0 to 0, the tokens in the cache, got 3"):
        lowbit.rewind_cache(lowbit.croppable_cache(model), 3)
