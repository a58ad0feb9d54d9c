# SPDX-License-Identifier: Apache-2.0
"""The table of the ops that `compile_options` has folded into each quantized linear layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lowbit.tables.table import Table


@dataclass(frozen=True, slots=True)
class FoldedLinear:
    """One call of `lowbit::linear` in a compiled graph: ``n x k``, its dtype, the post-ops that it took, and what
    follows it but stayed outside, with the reason."""

    shape: str
    dtype: str
    folded: str
    left: str


class FoldReport(list[FoldedLinear]):
    """An entry for each linear op of the graphs that were compiled; equal ones share a line."""

    _HEADER = ("n x k", "dtype", "calls", "folded", "left")
    _EMPTY = "no quantized linear layer was compiled with these options; a graph from Inductor's cache is not looked at"

    def _table(self) -> Table:
        rows = (
            (entry.shape, entry.dtype, str(count), entry.folded, entry.left) for entry, count in Counter(self).items()
        )
        return Table(self._HEADER, list(rows)) if self else Table(self._HEADER, [], self._EMPTY)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()
