# SPDX-License-Identifier: Apache-2.0
"""A picture of layers before and after a change: bars of a cost, and the error below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowbit.tables.pyplot import pyplot


def layer_picture(
    asker: str,
    names: Sequence[str],
    before: Sequence[float],
    after: Sequence[float],
    kinds: Sequence[str],
    errors_db: Sequence[float],
    *,
    label_before: str,
    unchanged: str,
) -> tuple[Any, Any]:
    """Draw the bars of each layer, in a colour per kind, and below them its error if that is finite; return both axes.

    Args:
        asker: the caller, for errors.
        names: the names of the layers.
        before, after: the cost of each layer.
        kinds: what became of each layer, for the legend.
        errors_db: the error of each layer in dB.
        label_before: the label of the bars before.
        unchanged: the kind of layers that stayed as they were, which are grey.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = pyplot(asker)
    positions = range(len(names))
    size = (min(16, 4 + 0.22 * len(names)), 5.5)
    _, (costs, errors) = plt.subplots(2, 1, sharex=True, figsize=size, layout="constrained")
    costs.bar(positions, before, color="0.85", label=label_before)
    for index, kind in enumerate(dict.fromkeys(kinds)):
        of_kind = [i for i in positions if kinds[i] == kind]
        color = "0.6" if kind == unchanged else f"C{index}"
        costs.bar(of_kind, [after[i] for i in of_kind], color=color, label=kind)
        known = [i for i in of_kind if math.isfinite(errors_db[i])]
        errors.scatter(known, [errors_db[i] for i in known], color=color)
    costs.legend(fontsize="small")
    errors.set_xticks(list(positions), names, rotation=90, fontsize="x-small")
    return costs, errors
