# SPDX-License-Identifier: Apache-2.0
"""Api, the argument of a package's entry point `def register(api)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lowbit import _C


class Api:
    """The object through which a package adds its kernel rows. All rows are added when ``register`` returns, and none
    if it raises.

    Attributes:
        version: the version of this interface, 1.
        lowbit_version: the version of lowbit, such as ``"0.1.0"``.
        by: the name of the package, from its metadata.
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
            path: the library, which exports ``lowbit_backend_rows``.

        Returns:
            The names of the rows.

        Raises:
            RuntimeError: ``register`` has already returned.
            ValueError: the library cannot be loaded, or its table is missing, has another version, or has an invalid
                row. The message says which. No row is added then.
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
            name: the name of the row, ``<op>_<what>_<who>``; it must be unique.
            device: the type of device that it runs on, as in `lowbit.kernels`.
            function: gets the arguments of the op by their names in ``lowbit/backend.h``: tensors, which are views of
                the call's memory and valid during the call; names of enumerators; numbers. It writes its results to the
                tensors passed for them.
            refuses: gets the same arguments, with tensors on torch's device ``"meta"``, and returns why the row cannot
                run the call, or None. Without it, the row runs every call.
            first: whether the row is tried before lowbit's; by default it is tried after them.

        Raises:
            RuntimeError: ``register`` has already returned.
            ValueError: ``op`` is not in ``OPS``.
        """
        self._open().add_kernel(op, name, device, function, refuses, first)
        self.names.append(name)

    def commit(self) -> None:
        """Add the rows to the list. lowbit calls this when ``register`` has returned.

        Raises:
            ValueError: the name of a row is already used or does not begin with its op, or device is not a type of
                device. No row is added then.
        """
        rows = self._open()
        self.close()
        rows.commit(self.by)

    def close(self) -> None:
        """Reject further rows. lowbit calls this when ``register`` has returned or raised."""
        self._rows = None

    def _open(self) -> Any:
        if self._rows is None:
            raise RuntimeError(f"{self.by}: the list of backends is complete; rows are added while register() runs")
        return self._rows
