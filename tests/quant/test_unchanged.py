# SPDX-License-Identifier: Apache-2.0
"""Entries that a kept result depends on: every change of one is seen, and its way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lowbit import _C
from lowbit.quant.unchanged import Unchanged

CHANGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "another value": (lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m, "scale", SCALE)),
    "an equal value": (lambda m: setattr(m, "scale", SCALE + 0.0), lambda m: setattr(m, "scale", SCALE)),
    "a value less": (lambda m: delattr(m, "scale"), lambda m: setattr(m, "scale", SCALE)),
    "a value more": (lambda m: setattr(m, "forward", m.forward), lambda m: delattr(m, "forward")),
    "another class": (lambda m: setattr(m, "__class__", nn.Module), lambda m: setattr(m, "__class__", nn.Linear)),
    "a hook": (lambda m: m.register_forward_hook(print), lambda m: m._forward_hooks.clear()),
}
SCALE = 0.125


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_its_way_back(change: str) -> None:
    module, unchanged = nn.Linear(2, 2), Unchanged()
    module.scale = SCALE
    assert not unchanged.holds()  # nothing was noted
    unchanged.note(module.__dict__, "scale", "none")
    unchanged.note_module(module)
    unchanged.note_addresses([module.weight])
    there, back = CHANGES[change]
    for _ in range(2):
        assert unchanged.holds()
        there(module)
        assert not unchanged.holds()
        back(module)
    assert not copy.copy(unchanged).holds()


def test_entries_are_compared_by_identity() -> None:
    value = object()
    assert _C.entries_are([{"a": value, "b": None}] * 3, ["a", "b", "c"], [value, None, None])
    for key, other in (("a", object()), ("a", None), ("c", value)):
        assert not _C.entries_are([{"a": value}], [key], [other])


def test_wrong_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="keys and values must be 2, one for each of dicts, got 2 and 1"):
        _C.entries_are([{}, {}], ["a", "b"], [None])
    for dicts, keys, names in (([3], ["a"], "int and str"), ([{}], [3], "dict and int")):
        with pytest.raises(TypeError, match=f"dicts must be dict and keys str, got {names}"):
            _C.entries_are(dicts, keys, [None])
