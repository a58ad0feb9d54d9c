# SPDX-License-Identifier: Apache-2.0
"""The packages that were found, in order, with the reasons of those that added nothing."""

from __future__ import annotations

from lowbit import _C
from lowbit.backends import loading
from lowbit.backends.loading import Found


class Report(list[Found]):
    """One `Found` per package, in the order in which they were called; prints as text."""

    def __init__(self, packages: list[Found], autoload: str, missing: tuple[str, ...]) -> None:
        super().__init__(packages)
        self.autoload = autoload
        self.missing = missing
        """Names in LOWBIT_BACKENDS that match no package."""

    def __repr__(self) -> str:
        lines = [f"torch.backends   lowbit: {self.autoload}"]
        lines += [f"{loading.GROUP}  {package.name} {package.version}: {told(package)}" for package in self]
        absent = f"{loading.ALLOWED} names it, and it is not installed"
        lines += [f"{loading.GROUP}  {name}: {absent}" for name in self.missing]
        return "\n".join(lines if len(lines) > 1 else [*lines, f"{loading.GROUP}  no package has an entry point"])


def told(package: Found) -> str:
    """Return a package's result in one line."""
    return package.reason.partition("\n")[0] if package.reason else f"added {', '.join(package.rows)}"


def report() -> Report:
    """Report the packages with kernels for lowbit: the rows that each added, or why it added none.

    Like the first op, this completes the list of backends.

    Returns:
        A ``Report``, a list with an entry per package, which prints as text.

    Example:
        >>> lowbit.backends.report()
        torch.backends   lowbit: ran at import torch
        lowbit.backends  acme-kernels 1.2: added linear_int8_acme
    """
    from lowbit.devices.autoload import autoload_state  # here, because it needs torch, and the rest does not

    _C.external.added()
    missing = (loading.allowed() or set()) - {loading.normalized(package.name) for package in loading.found}
    return Report(loading.found, autoload_state(), tuple(sorted(missing)))


def added_by() -> dict[str, str]:
    """Return the package of each row that another package added."""
    return {str(row["name"]): str(row["by"]) for row in _C.external.added()}


def named(row: str, by: dict[str, str]) -> str:
    """Return the name of a row for tables, with its package in parentheses if it is not lowbit's."""
    return f"{row} ({by[row]})" if row in by else row
