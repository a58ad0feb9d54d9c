# SPDX-License-Identifier: Apache-2.0
"""The base of reports on the layers of a model. It prints as a table in which layers of one kind share a line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from lowbit.tables.folding import folded, label
from lowbit.tables.layers import Layers
from lowbit.tables.table import Table


class LayerTable:
    """The base of reports with ``rows``, one per layer."""

    rows: Sequence[Any]
    COLUMNS: ClassVar[tuple[str, ...]]

    @staticmethod
    def _alike(row: Any) -> Hashable:
        """Return the values that must be equal for rows of one kind to share a line."""
        raise NotImplementedError

    @staticmethod
    def _cells(rows: Any) -> tuple[str, ...]:
        """Return the cells after the name in a line for equal rows."""
        raise NotImplementedError

    def _title(self) -> str:
        return ""

    def _below(self) -> list[str]:
        raise NotImplementedError

    @property
    def layers(self) -> Layers[Any]:
        """The rows as a sequence, also by the name of the layer. It prints a line for each layer, where the report
        itself has one line for layers of one kind. ``to_pandas()`` makes a DataFrame of it."""
        return Layers(self.rows, lambda rows: Table(self.COLUMNS, [self._line(row) for row in rows]))

    def _line(self, row: Any) -> tuple[str, ...]:
        return label(row.layer), *self._cells([row])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        lines = [(name, *self._cells(rows)) for name, rows in folded(self.rows, self._alike)]
        return Table(self.COLUMNS, lines, self._title(), self._below())
