# SPDX-License-Identifier: Apache-2.0
"""The cache that grows in place holds what transformers' own holds, whatever is done to it in between."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from test_transformers import ids, llama, text  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

from lowbit.models.growing_cache import LEAST_ROOM, GrowingLayer  # noqa: E402


def states(
    tokens: int, batch: int = 2, dtype: torch.dtype = torch.float32, heads: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, heads, tokens, 8).to(dtype), torch.randn(batch, heads, tokens, 6).to(dtype)


def assert_same(ours: DynamicLayer, theirs: DynamicLayer) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    if theirs.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


STEPS = ("token", "chunk", "crop", "reorder", "repeat", "select", "reset", "bfloat16", "deepcopy", "inference", "leave")


@pytest.mark.parametrize("heads", [3, 1])
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=14), st.integers(0, 2**31))
@example(["token", "token", "leave", "crop", "token"], 0)  # the copy's last token was overwritten
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_calls_gives_what_the_class_of_transformers_gives(
    heads: int, steps: list[str], seed: int
) -> None:
    """Keys and values of one head whose sizes differ are columns of one tensor."""
    torch.manual_seed(seed)
    ours, theirs = GrowingLayer(), DynamicLayer()
    left: list[tuple[DynamicLayer, DynamicLayer]] = []  # copies that go on by themselves
    for step in steps:
        batch = theirs.keys.shape[0] if theirs.get_seq_length() else 2
        new = states({"chunk": 300}.get(step, 1), batch, torch.bfloat16 if step == "bfloat16" else torch.float32, heads)
        if step == "deepcopy":
            left.append((copy.deepcopy(ours), copy.deepcopy(theirs)))
        if step == "leave":
            left.append((copy.copy(ours), copy.copy(theirs)))
        for layer in (ours, theirs):
            length = layer.get_seq_length()
            if step == "crop" and length > 1:
                layer.crop(-1)
            elif step == "reorder":
                layer.reorder_cache(torch.arange(batch - 1, -1, -1))
            elif step == "repeat" and batch < 8:
                layer.batch_repeat_interleave(2)
            elif step == "select":
                layer.batch_select_indices(torch.tensor([0]))
            elif step == "reset":
                layer.reset()
            elif step == "inference":
                with torch.inference_mode():
                    layer.update(*new)
            elif step in ("token", "chunk", "bfloat16"):
                layer.update(*new)
        assert_same(ours, theirs)
    for one, other in left:
        if one.get_seq_length():
            new = states(2, other.keys.shape[0], heads=heads)
            one.update(*new)
            other.update(*new)
        assert_same(one, other)
    assert_same(ours, theirs)


def test_a_token_moves_nothing() -> None:
    layer = GrowingLayer()
    keys, _ = layer.update(*states(10))
    for _ in range(LEAST_ROOM):
        grown, _ = layer.update(*states(1))
        assert grown.data_ptr() == keys.data_ptr()
    grown, _ = layer.update(*states(1))
    assert grown.data_ptr() != keys.data_ptr() and torch.equal(grown[:, :, :10], keys)


def test_what_needs_a_gradient_has_it() -> None:
    layer = GrowingLayer()
    first, second = (states(3)[0].requires_grad_() for _ in range(2))
    layer.update(first, first[..., :6])
    keys, _ = layer.update(second, second[..., :6])
    keys.sum().backward()
    assert torch.equal(first.grad, torch.ones_like(first)) and torch.equal(second.grad, torch.ones_like(second))


def test_models_with_our_attention_get_it_by_themselves() -> None:
    model = llama()
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        cache = model(ids()).past_key_values
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 2
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        cache = model(ids()).past_key_values
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    assert [type(layer) for layer in DynamicCache(config=model.config).layers] == [DynamicLayer] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
        {"return_dict_in_generate": False, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_the_text_is_that_of_eager_attention(options: dict[str, object]) -> None:
    model, prompt = llama(), ids(1 if "prompt_lookup_num_tokens" in options else 2)
    assert torch.equal(text(model, "lowbit", prompt, **options), text(model, "eager", prompt, **options))


def test_assisted_decoding_crops_and_goes_on() -> None:
    model, assistant, prompt = llama(), llama(num_hidden_layers=1), ids(1)
    assistant.set_attn_implementation("lowbit")
    assert torch.equal(text(model, "lowbit", prompt, assistant_model=assistant), text(model, "eager", prompt))


def test_a_prompt_that_is_kept_serves_many_answers() -> None:
    model, prompt = llama(), ids(1, 12)
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        kept = model(prompt[:, :-1]).past_key_values
    wanted = text(model, "eager", prompt)
    for _ in range(2):
        assert torch.equal(text(model, "lowbit", prompt, past_key_values=copy.deepcopy(kept)), wanted)
