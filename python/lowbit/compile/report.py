# SPDX-License-Identifier: Apache-2.0
"""The report of `compile_options`: the ops folded into quantized linear layers, and the products timed by
max_autotune."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lowbit.tables.table import Table


@dataclass(frozen=True, slots=True)
class FoldedLinear:
    """One call of `lowbit::linear` in a compiled graph: ``n x k``, its dtype, the folded post-ops, and the op after it
    that was not folded, with the reason."""

    shape: str
    dtype: str
    folded: str
    left: str


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One product that was timed, or not timed for a reason.

    Args:
        shape: ``n x k`` of the weight.
        m: the rows of x; for a dynamic shape, the number it was timed with.
        dtype: the dtype of x.
        taken: the fastest choice: ``lowbit_linear``, a kernel row, or one of Inductor's.
        microseconds: the times of the choices by name, fastest first.
        left: the reason why it was not timed.
        first: the kernel row that a quantized layer uses by default.
    """

    shape: str
    m: str
    dtype: str
    taken: str = ""
    microseconds: tuple[tuple[str, float], ...] = ()
    left: str = ""
    first: str = ""


def microseconds(seconds: dict[str, float]) -> tuple[tuple[str, float], ...]:
    """Return the times in the form of `TimedProduct.microseconds`."""
    return tuple((name, 1e6 * time) for name, time in sorted(seconds.items(), key=lambda item: item[1]))


class FoldReport(list[FoldedLinear]):
    """An entry for each linear op of the compiled graphs; equal ones share a line. ``timed`` has an entry for each
    product that max_autotune considered."""

    _HEADER = ("n x k", "dtype", "calls", "folded", "left")
    _TIMED_HEADER = ("n x k", "m", "dtype", "calls", "taken", "us", "left")
    _EMPTY = "no quantized linear layer was compiled with these options; a graph from Inductor's cache is not looked at"

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[TimedProduct] = []

    def _tables(self) -> list[Table]:
        rows = [
            (entry.shape, entry.dtype, str(count), entry.folded, entry.left) for entry, count in Counter(self).items()
        ]
        timed = [
            (entry.shape, entry.m, entry.dtype, str(count), entry.taken, _written(entry), entry.left)
            for entry, count in Counter(self.timed).items()
        ]
        tables = [Table(self._HEADER, rows)] if rows else []
        tables += [Table(self._TIMED_HEADER, timed, "max_autotune")] if timed else []
        return tables or [Table(self._HEADER, [], self._EMPTY)]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables())


def _written(entry: TimedProduct) -> str:
    return ", ".join(f"{name} {time:.1f}" for name, time in entry.microseconds)
