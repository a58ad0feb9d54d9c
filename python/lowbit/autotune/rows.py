# SPDX-License-Identifier: Apache-2.0
"""The kernel rows that can serve a call of `linear`, and the forced kernel row."""

from __future__ import annotations

import os
from typing import Any

from lowbit import _C

_BETTER_FITS = "a better row fits"  # explain's reason for a row that could serve the call but comes later


def fitting_rows(*call: Any) -> list[str]:
    """Return the kernel rows that can serve a call, the default row first. The portable rows, which are much slower,
    are omitted if there is another one.

    Args:
        call: the arguments of `_C.explain_linear`: m, the numbers of `LinearArgs`, dtype and device of x.
    """
    rows = _C.explain_linear(*call)
    others = [str(row["name"]) for row in rows if row["reason"] == _BETTER_FITS]
    return [
        *(str(row["name"]) for row in rows if row["chosen"]),
        *(row for row in others if not row.endswith("_scalar")),
    ]


def serves(row: str, *call: Any) -> bool:
    """Return whether a kernel row can serve a call, which is given as in `fitting_rows`."""
    found = next((found for found in _C.explain_linear(*call) if found["name"] == row), None)
    return found is not None and (bool(found["chosen"]) or found["reason"] == _BETTER_FITS)


def alike(row: str) -> list[str]:
    """Return the kernel row if this machine can run it, otherwise the same rows of other instruction sets, which serve
    the same formats: ``linear_int4_avx2`` for ``linear_int4_avx512``. Empty if there are none."""
    known = {str(found["name"]): found for found in _C.kernels("linear")}
    if known[row]["available"]:
        return [row]
    of_all = {name: name.removesuffix(f"_{found['backend']}") for name, found in known.items()}
    return [name for name, stem in of_all.items() if stem == of_all[row] and known[name]["available"]]


def forced_row() -> str:
    """Return the kernel row of linear that `force_kernel` or LOWBIT_KERNEL forces, or an empty string."""
    forced = _C.force_kernel(None)
    _C.force_kernel(forced)
    forced = forced or os.environ.get("LOWBIT_KERNEL", "")
    return forced if any(row["name"] == forced for row in _C.kernels("linear")) else ""
