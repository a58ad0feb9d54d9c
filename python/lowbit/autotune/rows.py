# SPDX-License-Identifier: Apache-2.0
"""The kernel rows that can serve a call of `linear`, and the one that is forced."""

from __future__ import annotations

import os
from typing import Any

from lowbit import _C

_BETTER_FITS = "a better row fits"  # the reason of explain for a row that could serve the call too


def fitting_rows(*call: Any) -> list[str]:
    """Rows that can serve the call, the one that is first anyway before the others; without the portable rows, which
    are up to a thousand times slower, where there is another.

    Args:
        call: m, the numbers of `LinearArgs`, dtype and device of x, as `_C.explain_linear` takes them.
    """
    rows = _C.explain_linear(*call)
    others = [str(row["name"]) for row in rows if row["reason"] == _BETTER_FITS]
    return [
        *(str(row["name"]) for row in rows if row["chosen"]),
        *(row for row in others if not row.endswith("_scalar")),
    ]


def serves(row: str, *call: Any) -> bool:
    """Whether a row can serve a call, whose numbers are those of `fitting_rows`."""
    found = next((found for found in _C.explain_linear(*call) if found["name"] == row), None)
    return found is not None and (bool(found["chosen"]) or found["reason"] == _BETTER_FITS)


def forced_row() -> str:
    """The row of linear that `force_kernel` or LOWBIT_KERNEL forces here, or nothing."""
    forced = _C.force_kernel(None)
    _C.force_kernel(forced)
    forced = forced or os.environ.get("LOWBIT_KERNEL", "")
    return forced if forced.startswith("linear_") else ""
