# SPDX-License-Identifier: Apache-2.0
"""Kernels of other packages: the packages that were found (`report()`), and the tools to write one (`Api`,
`include_dir()`, `OPS`). docs/devices.md has the rules, docs/recipes/add_a_backend.md an example."""

from __future__ import annotations

from pathlib import Path

from lowbit import _C
from lowbit.backends.api import Api
from lowbit.backends.report import Report, report

OPS: tuple[str, ...] = _C.external.OPS
"""The ops to which other packages may add rows."""

__all__ = ["OPS", "Api", "Report", "include_dir", "report"]


def include_dir() -> str:
    """Return the include folder for C rows (``#include <lowbit/backend.h>``) and C programs (``<lowbit/lowbit.h>``).

    Example:
        >>> sorted(os.listdir(os.path.join(lowbit.backends.include_dir(), "lowbit")))
        ['backend.h', 'lowbit.h', 'torch.h', 'types.h']
    """
    return str(Path(_C.__file__).with_name("include"))
