# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowbit.autotune.plan_row import PlanRow
from lowbit.tables.pyplot import pyplot


def picture(layers: Sequence[PlanRow], bound_db: float) -> Any:
    """Draw bars of each measured layer's time before and after, below them its dB and the bound; return both axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = pyplot("Plan.plot")
    rows = [row for row in layers if row.seconds]
    formats = ["float" if row.spec is None else row.spec.name for row in rows]
    places = range(len(rows))
    size = (min(16, 4 + 0.22 * len(rows)), 5.5)
    _, (times, errors) = plt.subplots(2, 1, sharex=True, figsize=size, layout="constrained")
    times.bar(places, [1e3 * row.float_seconds for row in rows], color="0.85", label="float, before")
    for index, name in enumerate(dict.fromkeys(formats)):
        of_name = [place for place in places if formats[place] == name]
        color = "0.6" if name == "float" else f"C{index}"
        times.bar(of_name, [1e3 * rows[place].seconds for place in of_name], color=color, label=name)
        exact = [place for place in of_name if math.isfinite(rows[place].error_db)]
        errors.scatter(exact, [rows[place].error_db for place in exact], color=color)
    if math.isfinite(bound_db):
        errors.axhline(bound_db, color="0.3", linestyle="--", label=f"bound {bound_db:g} dB")
        errors.legend()
    times.set_ylabel("ms in a run of the model")
    times.legend(fontsize="small")
    errors.set_ylabel("dB of the layer's output")
    errors.set_xticks(list(places), [row.layer for row in rows], rotation=90, fontsize="x-small")
    return times, errors
