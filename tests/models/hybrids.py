# SPDX-License-Identifier: Apache-2.0
"""What tests of models with recurrent layers share: a padded prompt, and how close logits must be."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from decoders import prompt
from torch import Tensor, nn

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
