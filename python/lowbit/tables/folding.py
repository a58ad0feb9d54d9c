# SPDX-License-Identifier: Apache-2.0
"""Layers of one kind as one line: ``model.layers.*.mlp.up_proj x 30``.

Layers are of one kind if their names differ only in numbers. Layers of one kind share a line if all their cells are
equal. If other layers of the kind are not on the line, it says so: ``model.layers.*.mlp.up_proj x 28 of 30``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

LEAST = 3
"""The min number of equal layers that share a line. Fewer get a line each."""

Row = TypeVar("Row")


def folded(
    rows: Iterable[Row], alike: Callable[[Row], Hashable], name: Callable[[Any], str] = attrgetter("layer")
) -> list[tuple[str, list[Row]]]:
    """Return the lines of a table of layers: the label of each, and its rows.

    Args:
        rows: one per layer.
        alike: the values that must be equal for rows of one kind to share a line.
        name: returns the layer's name.
    """
    kinds: dict[str, dict[Hashable, list[Row]]] = {}
    for row in rows:
        kinds.setdefault(_kind(name(row)), {}).setdefault(alike(row), []).append(row)
    lines = []
    for kind, groups in kinds.items():
        count = sum(map(len, groups.values()))
        for group in groups.values():
            if len(group) < LEAST:
                lines += [(label(name(row)), [row]) for row in group]
            else:
                lines.append((f"{kind} x {len(group)}" + (f" of {count}" if count > len(group) else ""), group))
    return lines


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def label(name: str) -> str:
    """Return the name of a layer in tables."""
    return name or "(the model)"


def first_five(names: Sequence[str]) -> str:
    """Return the first five names of a list for an error message, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "none") + more


def spread(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return the min and max of several layers' values, or the one value if they are equal. Unknown values (nan) are
    ignored."""
    known = [value for value in values if not math.isnan(value)]
    return " to ".join(dict.fromkeys(map(text, (min(known), max(known))))) if known else ""


def decibels(values: Iterable[float]) -> str:
    """Return the errors of several layers in dB."""
    return spread(values, lambda value: "exact" if value == math.inf else f"{value:.1f}")


class LayerNames(list[str]):
    """Names of layers; prints one line for those of a kind."""

    def __repr__(self) -> str:
        return "\n".join(_lines(self)) or "no layer"


def told(names: Sequence[str]) -> str:
    """Return the names as part of a sentence."""
    return ", ".join(_lines(names))


def _lines(names: Sequence[str]) -> list[str]:
    return [line for line, _ in folded(names, lambda name: None, str)]
