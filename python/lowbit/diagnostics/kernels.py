# SPDX-License-Identifier: Apache-2.0
"""The kernel rows of an op, and a context manager that forces one by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowbit import _C
from lowbit.backends.report import added_by, named
from lowbit.devices import places
from lowbit.tables.table import html_table, text_table


class KernelTable(list[dict[str, object]]):
    """Rows ``{"name", "backend", "device", "available", "reason"}`` in the order in which they are tried. The backend
    of a row that another package added is that package. Prints as a table."""

    _HEADER = ("row", "device", "runs here", "why not")

    def _cells(self) -> list[tuple[str, ...]]:
        by = added_by()
        return [
            (named(str(row["name"]), by), str(row["device"]), "yes" if row["available"] else "no", str(row["reason"]))
            for row in self
        ]

    def __repr__(self) -> str:
        return text_table(self._HEADER, self._cells())

    def _repr_html_(self) -> str:
        return html_table(self._HEADER, self._cells())


def kernels(op: str = "linear") -> KernelTable:
    """List the kernel rows of an op on the devices that lowbit supports in this process, best first.

    Args:
        op: the name of the op.

    Raises:
        ValueError: there is no such op.
    """
    return KernelTable(dict(row) for row in _C.kernels(op) if row["device"] in places.types())


@contextlib.contextmanager
def force_kernel(name: str) -> Iterator[None]:
    """Allow only the kernel row of this name for its op, on this thread. A call that the row cannot run fails with the
    reason.

    Args:
        name: the name of the row.

    Raises:
        ValueError: there is no row of this name; the message lists the rows.

    Example:
        >>> with lowbit.force_kernel("linear_int8_scalar"):
        ...     y = layer(x)
    """
    previous = _C.force_kernel(name)
    try:
        yield
    finally:
        _C.force_kernel(previous)
