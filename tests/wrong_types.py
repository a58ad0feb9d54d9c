# SPDX-License-Identifier: Apache-2.0
"""JSON documents with one value of a wrong type: what a loader must refuse by a ValueError, or read and show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

WRONG = (None, True, -1, 7, 2**70, 1.5, "8", [], [1], [[]], {}, {"a": 1})


def variants(document: Any) -> Iterator[tuple[str, Any]]:
    """Every document with one value replaced, one entry missing or one too many; the first of them is told by its place."""
    for place in [()] + [place for place, _ in _places(document, ())]:
        for value in WRONG:
            yield f"{place} = {value!r}", _replaced(document, place, value)
    for place, kind in [((), type(document)), *_places(document, ())]:
        if kind is dict:
            yield f"{place} with one more", _changed(document, place, lambda it: it.update(more=1))
        if place:
            yield f"{place} missing", _changed(document, place[:-1], lambda it, name=place[-1]: it.pop(name))


def _places(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], type]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*place, name), type(item)
        yield from _places(item, (*place, name))


def _replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return copy.deepcopy(value)
    return _changed(document, place[:-1], lambda it: it.__setitem__(place[-1], copy.deepcopy(value)))


def _changed(document: Any, place: tuple[Any, ...], change: Any) -> Any:
    document = copy.deepcopy(document)
    at = document
    for name in place:
        at = at[name]
    change(at)
    return document
