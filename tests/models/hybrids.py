# SPDX-License-Identifier: Apache-2.0
"""What tests of models with recurrent layers share: a padded prompt, how close logits must be, and calls by a model and by
its fused copy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from decoders import answer, logits, prompt, transformers
from torch import Tensor, nn

from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.models.token_run import AHEAD

BUDGET = 2e-4  # of the largest logit: a few layers of float32 sums in another order


def close(got: Tensor, wanted: Tensor, budget: float = BUDGET) -> None:
    assert (got - wanted).abs().max() <= budget * wanted.abs().max()


def padded() -> tuple[Tensor, Tensor]:
    ids, seen = prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    seen[0, :4], seen[2, :1] = 0, 0
    return ids, seen


def same_gradients(
    model: nn.Module, other: nn.Module, monkeypatch: pytest.MonkeyPatch, room: ModuleType, op: str
) -> None:
    """In evaluation and in training a fused model has the gradients of transformers' functions, with and without a cache
    that begins, and computes them by the op. A token behind a cache, whose state changes in place, is left to
    transformers."""
    ids, calls = prompt(2, 40), []
    function = getattr(room, op)
    monkeypatch.setattr(room, op, lambda *given, **named: calls.append(op) or function(*given, **named))
    for training in (False, True):
        for use_cache in (False, True):
            for each in (model, other):
                each.train(training).zero_grad()
                each(ids, labels=ids, use_cache=use_cache).loss.backward()
            assert calls
            calls.clear()
            # A gradient that is far smaller than others has the roundings of the sums that those have too.
            parameters = {name: one for name, one in model.named_parameters() if one.grad is not None}
            others = {name: two for name, two in other.named_parameters() if two.grad is not None}
            assert parameters.keys() == others.keys()
            rounding = 1e-6 * max(one.grad.abs().max() for one in parameters.values())
            for name, one in parameters.items():
                assert (others[name].grad - one.grad).abs().max() <= 1e-3 * one.grad.abs().max() + rounding, name


def same_caches(one: Any, two: Any, budget: float = BUDGET) -> None:
    for mine, theirs in zip(one.layers, two.layers, strict=True):
        pairs = []
        if hasattr(theirs, "conv_states"):
            assert mine.has_previous_state == theirs.has_previous_state
            pairs = [(getattr(mine, each)[0], getattr(theirs, each)[0]) for each in ("conv_states", "recurrent_states")]
        if hasattr(theirs, "get_seq_length"):
            assert mine.get_seq_length() == theirs.get_seq_length()
            pairs += [(mine.keys, theirs.keys), (mine.values, theirs.values)]
        for held, wanted in pairs:
            assert (held is None) is (wanted is None)
            if held is not None:
                assert held.dtype is wanted.dtype
                close(held, wanted, budget)


def cache_name(model: nn.Module) -> str:
    """Return the name that the model has for its cache."""
    return "cache_params" if model.config.model_type in ("mamba", "falcon_mamba", "mamba2") else "past_key_values"


def in_parts(models: list[nn.Module], parts: list[Tensor]) -> tuple[Tensor, Any]:
    """Logits of the parts, each by its model, with one cache, and that cache."""
    cache, told = transformers.DynamicCache(config=models[0].config), []
    for model, part in zip(models, parts, strict=True):
        told.append(model(part, **{cache_name(model): cache}, use_cache=True).logits)
    return torch.cat(told, 1), cache


def one_call_each(model: nn.Module, other: nn.Module, calls: list[int], states: int) -> None:
    """A prompt and tokens behind it are one call each of the fused model, with these states."""
    parts = list(prompt(2, 11).split([7, *4 * [1]], 1))
    wanted, theirs = in_parts(5 * [model], parts)
    got, mine = in_parts(5 * [other], parts)
    assert calls == 5 * [states]
    close(got, wanted)
    same_caches(mine, theirs)
    close(logits(other, prompt(2, 11), use_cache=False), logits(model, prompt(2, 11), use_cache=False))


def padding_is_masked(model: nn.Module, other: nn.Module, calls: list[int], states: int) -> None:
    """On the left, as `generate` wants it."""
    ids, seen = padded()
    got, wanted = (logits(each, ids, attention_mask=seen) for each in (other, model))
    assert calls == [states]
    close(got[seen.bool()], wanted[seen.bool()])


def tokens_are_runs(model: nn.Module, other: nn.Module, runs: list[bool], exact: bool) -> None:
    """The tokens are those of transformers' loop, and if ``exact`` those of the modules too; int8 activations that are on
    the edge may round to the next code."""
    more = {"eos_token_id": None, "max_new_tokens": AHEAD + 6, "pad_token_id": 0}
    got = answer(other, prompt(), **more)
    assert runs == (AHEAD + 5) * [True]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FusedCausalLM, "_sample")
        assert torch.equal(answer(other, prompt(), **more), got)
    (ids, seen), told = padded(), len(runs)
    got = answer(other, ids, attention_mask=seen)
    assert all(runs) and len(runs) > told
    assert not exact or torch.equal(got, answer(model, ids, attention_mask=seen))
