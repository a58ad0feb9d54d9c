# SPDX-License-Identifier: Apache-2.0
"""The base of reports on the layers of a model: prints as a table in which layers of one kind share a line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from lowbit.tables.folding import folded, label
from lowbit.tables.table import Table


class LayerTable:
    """Base of reports with ``rows``, one per layer."""

    rows: Sequence[Any]
    COLUMNS: ClassVar[tuple[str, ...]]

    @staticmethod
    def _alike(row: Any) -> Hashable:
        """The values that rows of one kind must have in common to share a line."""
        raise NotImplementedError

    @staticmethod
    def _cells(rows: Any) -> tuple[str, ...]:
        """The cells of a line behind the name, for rows that are alike."""
        raise NotImplementedError

    def _title(self) -> str:
        return ""

    def _below(self) -> list[str]:
        raise NotImplementedError

    @property
    def layers(self) -> Table:
        """Every layer with a line of its own; printed as a whole, layers of one kind have one line."""
        return Table(self.COLUMNS, [(label(row.layer), *self._cells([row])) for row in self.rows])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        lines = [(name, *self._cells(rows)) for name, rows in folded(self.rows, self._alike)]
        return Table(self.COLUMNS, lines, self._title(), self._below())
