# SPDX-License-Identifier: Apache-2.0
"""Api, the argument of a package's function: `def register(api)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lowbit import _C


class Api:
    """Takes the kernel rows of one package. All of them join the list when ``register`` returns; none, if it raises.

    Attributes:
        version: of this interface, 1.
        lowbit_version: of lowbit, such as ``"0.1.0"``.
        by: name of the package, as its metadata have it.
    """

    version = 1
    lowbit_version: str = _C.version

    def __init__(self, by: str) -> None:
        self.by = by
        self.names: list[str] = []
        self._rows: Any = _C.external.Rows()

    def add_library(self, path: str | os.PathLike[str]) -> list[str]:
        """Add the C rows of a shared library (``lowbit/backend.h``).

        Args:
            path: of the library, which exports ``lowbit_backend_rows``.

        Returns:
            Names of the rows.

        Raises:
            RuntimeError: ``register`` has returned.
            ValueError: the library cannot be loaded, has no table, one of another version, or one with a row that
                cannot be: says which. None of its rows is added then.
        """
        names: list[str] = self._open().add_library(os.fspath(path))
        self.names += names
        return names

    def add_kernel(
        self,
        op: str,
        name: str,
        device: str,
        function: Callable[..., None],
        refuses: Callable[..., str | None] | None = None,
        *,
        first: bool = False,
    ) -> None:
        """Add a function as a row of an op.

        Args:
            op: one of ``lowbit.backends.OPS``.
            name: of the row, ``<op>_<what>_<who>``; no other row may have it.
            device: type of the device that it runs on, as `lowbit.kernels` names it.
            function: gets the arguments of the op by the names that they have in ``lowbit/backend.h``: tensors, which
                are views of the memory of the call, for the time of the call; names of enumerations; numbers. It
                writes its results into the tensors that are there for them.
            refuses: gets the same, with tensors of torch's device ``"meta"``; returns why the row cannot run the call,
                or None. Without it the row runs every call.
            first: the row comes before those of lowbit; else behind them.

        Raises:
            RuntimeError: ``register`` has returned.
            ValueError: op is not offered.
        """
        self._open().add_kernel(op, name, device, function, refuses, first)
        self.names.append(name)

    def commit(self) -> None:
        """Put the rows into the list; lowbit calls it when ``register`` has returned.

        Raises:
            ValueError: a row has a name that another one has, or that does not begin with its op; device is no type of
                device. Then none is added.
        """
        rows = self._open()
        self.close()
        rows.commit(self.by)

    def close(self) -> None:
        """Take nothing more; lowbit calls it when ``register`` has returned or raised."""
        self._rows = None

    def _open(self) -> Any:
        if self._rows is None:
            raise RuntimeError(f"{self.by}: the list of backends is complete; rows are added while register() runs")
        return self._rows
