# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowbit.autotune.plan_row import BY_BYTES, PlanRow
from lowbit.tables.layer_picture import layer_picture


def picture(layers: Sequence[PlanRow], bound_db: float) -> Any:
    """Plot the time of each measured layer before and after, and below it the SQNR and the bound; return both axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [row for row in layers if row.seconds]
    times, errors = layer_picture(
        "Plan.plot",
        [row.layer for row in rows],
        [1e3 * row.float_seconds for row in rows],
        [1e3 * row.seconds for row in rows],
        ["float" if row.spec is None else row.spec.name for row in rows],
        [row.error_db for row in rows],
        label_before="float, before",
        unchanged="float",
    )
    if math.isfinite(bound_db):
        errors.axhline(bound_db, color="0.3", linestyle="--", label=f"bound {bound_db:g} dB")
        errors.legend()
    by_bytes = any(row.note == BY_BYTES for row in rows)
    times.set_ylabel("ms in a run of the model" + (", by bytes" if by_bytes else ""))
    errors.set_ylabel("dB of the layer's output")
    return times, errors
