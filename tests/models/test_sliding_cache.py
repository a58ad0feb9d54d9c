# SPDX-License-Identifier: Apache-2.0
"""The cache of a layer with a window holds, returns and refuses what transformers' own does, and moves nothing
for a token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import answer, calls_of_layers, logits, made, prompt, transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import lowbit
from lowbit.models.growing_cache import LEAST_ROOM, GrowingLayer, GrowingSlidingLayer, new_tokens


def states(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, tokens, 8).to(dtype), torch.randn(batch, 3, tokens, 6).to(dtype)


def assert_same(ours: GrowingSlidingLayer, theirs: DynamicSlidingWindowLayer) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length() and ours.is_initialized == theirs.is_initialized
    assert [ours.get_mask_sizes(n) for n in (1, 5)] == [theirs.get_mask_sizes(n) for n in (1, 5)]
    if theirs.is_initialized:
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def batch_of(layer: DynamicLayer) -> int:
    return layer.keys.shape[0] if layer.is_initialized and layer.keys.dim() == 4 else 2


def in_place(layer: GrowingSlidingLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As fused attention writes it, where the sizes of keys and values are one; what the op would see."""
    batch, heads, length, size = keys.shape
    room_of_keys, room_of_values, start = layer.room_for(length, new_tokens(batch, heads, size, keys), keys)
    seen = []
    for room, new in ((room_of_keys, keys), (room_of_values, values)):
        room.narrow(-2, start, length).copy_(new)
        seen.append(room.narrow(-2, 0, start + length))
    held = layer.last(layer.extend(length))
    assert all(map(torch.equal, held, seen))
    return held


STEPS = (
    "token", "token", "chunk", "long", "in place", "in place", "crop", "crop", "crop 0", "reorder", "repeat", "select",
    "reset", "bfloat16", "deepcopy", "inference", "leave", "record",
)  # fmt: skip


def stepped(layer: DynamicSlidingWindowLayer, step: str, amount: int, new: tuple[Tensor, Tensor]) -> Any:
    """The result of the step, or the text of its error."""
    batch = batch_of(layer)
    try:
        if step.startswith("crop"):
            return layer.crop(0 if step == "crop 0" else -min(amount, max(layer.get_seq_length() - 1, 1)))
        if step == "reorder":
            return layer.reorder_cache(torch.arange(batch - 1, -1, -1))
        if step == "repeat":
            return layer.batch_repeat_interleave(2 if batch < 8 else 1)
        if step == "select":
            return layer.batch_select_indices(torch.tensor([batch - 1]))
        if step == "reset":
            return layer.reset()
        if step == "record":
            return layer.activate_past_recording()
        if step == "inference":
            with torch.inference_mode():
                return layer.update(*new)
        if step == "in place" and isinstance(layer, GrowingSlidingLayer) and not (layer.get_seq_length() and layer.keys.dtype != new[0].dtype):
            return in_place(layer, *new)
        return layer.update(*new)
    except (RuntimeError, AttributeError) as error:
        return f"{type(error).__name__} {error}"


@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 12)), min_size=1, max_size=24),
    st.integers(0, 2**31),
)
@example(2, [("token", 1)] * 4 + [("record", 1), ("token", 1), ("token", 1), ("crop", 1), ("token", 1)], 0)
@example(4, [("record", 1), ("chunk", 9), ("in place", 3), ("in place", 3), ("crop", 4), ("leave", 1), ("token", 1)], 0)
@example(5, [("long", 1), ("token", 1), ("in place", 1), ("deepcopy", 1), ("chunk", 3)], 0)
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_calls_gives_what_the_class_of_transformers_gives(window: int, steps: list[tuple[str, int]], seed: int) -> None:
    torch.manual_seed(seed)
    ours, theirs = GrowingSlidingLayer(window), DynamicSlidingWindowLayer(window)
    left: list[tuple[GrowingSlidingLayer, DynamicSlidingWindowLayer]] = []  # copies that go on by themselves
    for step, amount in steps:
        batch = batch_of(theirs)
        new = states({"chunk": amount, "long": 700, "in place": amount}.get(step, 1), batch, torch.bfloat16 if step == "bfloat16" else torch.float32)
        if step == "in place":
            new = new[0], torch.randn_like(new[0])
            if theirs.is_initialized and theirs.values.dim() == 4 and theirs.values.shape[-1] != 8:
                continue
        elif theirs.is_initialized and theirs.values.dim() == 4 and theirs.values.shape[-1] == 8:
            new = new[0], torch.randn_like(new[0])
        if step == "deepcopy":
            left.append((copy.deepcopy(ours), copy.deepcopy(theirs)))
        elif step == "leave":
            left.append((copy.copy(ours), copy.copy(theirs)))
        else:
            got, wanted = stepped(ours, step, amount, new), stepped(theirs, step, amount, new)
            assert type(got) is type(wanted)
            assert got == wanted if not isinstance(got, tuple) else all(map(torch.equal, got, wanted))
        assert_same(ours, theirs)
    for one, other in left:
        if one.get_seq_length():
            new = torch.randn(*other.keys.shape[:2], 2, 8), torch.randn(*other.keys.shape[:2], 2, other.values.shape[-1])
            assert all(map(torch.equal, one.update(*new), other.update(*new)))
        assert_same(one, other)
    assert_same(ours, theirs)


@pytest.mark.parametrize("window", [8, 1000])
def test_a_window_is_moved_only_when_its_room_is_full(window: int) -> None:
    layer, moves = GrowingSlidingLayer(window), 0
    keys, _ = layer.update(*states(window))
    at = keys.untyped_storage().data_ptr()
    for _ in range(4 * LEAST_ROOM):
        keys, _ = layer.update(*states(1))
        moves += keys.untyped_storage().data_ptr() != at
        at = keys.untyped_storage().data_ptr()
    assert moves <= 5
    assert keys.untyped_storage().nbytes() <= 1.3 * (window + 2 * LEAST_ROOM) * 2 * 3 * 8 * 4


def test_a_prompt_longer_than_the_window_is_forgotten_with_the_next_token() -> None:
    layer = GrowingSlidingLayer(16)
    layer.update(*states(5000))
    keys, _ = layer.update(*states(1))
    assert keys.shape[-2] == 16 and keys.untyped_storage().nbytes() < 1000 * 2 * 3 * 8 * 4


def test_what_needs_a_gradient_has_it() -> None:
    layer = GrowingSlidingLayer(4)
    first, second = (states(3)[0].requires_grad_() for _ in range(2))
    layer.update(first, first[..., :6])
    keys, _ = layer.update(second, second[..., :6])
    keys.sum().backward()
    assert torch.equal(first.grad, torch.ones_like(first)) and torch.equal(second.grad, torch.ones_like(second))


KINDS = {"mistral": [True, True], "gemma2": [True, False], "gemma3": [True, False]}


@pytest.mark.parametrize("name", KINDS)
def test_models_with_our_attention_get_it_by_themselves(name: str) -> None:
    cache = transformers.DynamicCache(config=made(name).config)
    assert [type(layer) for layer in cache.layers] == [GrowingSlidingLayer if slides else GrowingLayer for slides in KINDS[name]]
    cache = transformers.DynamicCache(config=made(name, attention="eager").config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer if slides else DynamicLayer for slides in KINDS[name]]


def assisted(model: nn.Module) -> Tensor:
    helper = made("mistral", num_hidden_layers=1, attention=model.config._attn_implementation)
    return answer(model, prompt(1), assistant_model=helper, max_new_tokens=20)


def kept_prompt(model: nn.Module) -> Tensor:
    """A cache that serves two answers."""
    with torch.no_grad():
        kept = model(prompt(1)[:, :-1], past_key_values=transformers.DynamicCache(config=model.config)).past_key_values
    answers = [answer(model, prompt(1), past_key_values=copy.deepcopy(kept)) for _ in range(2)]
    assert torch.equal(*answers)
    return answers[0]


USES: dict[str, Callable[[nn.Module], Tensor]] = {
    "a prompt longer than the window": lambda model: answer(model, prompt(2, 30)),
    "a prompt shorter than the window": lambda model: answer(model, prompt(2, 3), max_new_tokens=20),
    "left padding": lambda model: answer(model, prompt(), attention_mask=torch.tensor([[0] * 7 + [1] * 2, [1] * 9])),
    "beams": lambda model: answer(model, prompt(), num_beams=3, num_return_sequences=2),
    "prompt lookup": lambda model: answer(model, prompt(1), prompt_lookup_num_tokens=3, max_new_tokens=20),
    "an assistant": assisted,
    "chunked prompt": lambda model: answer(model, prompt(1, 20), prefill_chunk_size=7),
    "a kept prompt": kept_prompt,
    "a long answer": lambda model: answer(model, prompt(1, 4), max_new_tokens=110),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", KINDS)
def test_every_use_says_what_the_cache_of_transformers_says(name: str, use: str) -> None:
    wanted = USES[use](made(name, attention="eager"))
    model = made(name)
    assert torch.equal(USES[use](model), wanted)
    lowbit.fuse(model)
    assert torch.equal(USES[use](model), wanted)


@pytest.mark.parametrize("name", KINDS)
def test_fused_layers_with_windows_are_in_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made(name), made(name, attention="eager")
    lowbit.fuse(model)
    cache, other = (transformers.DynamicCache(config=one.config) for one in (model, plain))
    with calls_of_layers(monkeypatch) as counts:
        for length in (9, 1, 3, 1, 40, 1):  # behind the window chunks need the mask
            ids = prompt(2, length)
            torch.testing.assert_close(logits(model, ids, past_key_values=cache), logits(plain, ids, past_key_values=other), rtol=1e-4, atol=1e-4)
    assert counts == [2] * 6
