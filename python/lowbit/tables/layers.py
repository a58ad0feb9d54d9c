# SPDX-License-Identifier: Apache-2.0
"""The layers of a report: a sequence that prints as a table with a line for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar, overload

from lowbit.tables.folding import first_five
from lowbit.tables.table import Table

Row = TypeVar("Row")


class Layers(Sequence[Row], Generic[Row]):
    """The rows of a report, by number or by the name of the layer. Printed, or shown by a notebook, each has a line."""

    def __init__(self, rows: Sequence[Row], table: Callable[[Sequence[Row]], Table]) -> None:
        self._rows, self._table = list(rows), table

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, which: int | str) -> Row: ...
    @overload
    def __getitem__(self, which: slice) -> Layers[Row]: ...
    def __getitem__(self, which: Any) -> Any:
        """Return one row, by number or by name, or for a slice some of them.

        Raises:
            IndexError, KeyError: there is no such number, no layer of this name.
        """
        if isinstance(which, slice):
            return Layers(self._rows[which], self._table)
        if not isinstance(which, str):
            return self._rows[which]
        found = next((row for row in self._rows if row.layer == which), None)
        if found is None:
            raise KeyError(
                f"layers: the name must be one of {first_five([row.layer for row in self._rows])}, got {which!r}"
            )
        return found

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row per layer and a column per field: numbers, not the text of the table.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("layers.to_pandas needs pandas: pip install pandas") from error
        names = [field.name for field in fields(self._rows[0])] if self._rows else ["layer"]  # type: ignore[arg-type]
        return pandas.DataFrame([[getattr(row, name) for name in names] for row in self._rows], columns=names)

    def __repr__(self) -> str:
        return repr(self._table(self._rows))

    def _repr_html_(self) -> str:
        return self._table(self._rows)._repr_html_()
