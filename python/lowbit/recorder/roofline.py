# SPDX-License-Identifier: Apache-2.0
"""The picture of a profile: a roofline (Williams, Waterman, Patterson, 2009)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.recorder.profile import Limits, RowTimes


def draw(rows: list[RowTimes], limits: Limits, ax: Any) -> Any:
    """Draw rows that count their products below the measured limits; return the axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('profile.plot needs matplotlib: pip install "lowbit[notebook]"') from error
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    counted = [row for row in rows if row.operations and row.seconds]
    at = [row.intensity for row in counted] or [1.0]
    left, right = min(0.1, min(at) / 2), max(1e4, max(at) * 2)
    for most, name, color in (
        (limits.float32, f"float: {limits.float32_of}", "C0"),
        (limits.int8, f"int8: {limits.int8_of}", "C1"),
    ):
        ridge = most / limits.bandwidth
        ax.plot([left, ridge, right], [left * limits.bandwidth / 1e9, most / 1e9, most / 1e9], color=color, label=name)
    longest = max((row.seconds for row in counted), default=1.0)
    for row in counted:
        color = "C1" if row.arithmetic == "int8" else "C0"
        size = 20 + 180 * row.seconds / longest
        ax.scatter([row.intensity], [row.operations_per_s / 1e9], s=size, color=color, alpha=0.7, zorder=3)
        ax.annotate(row.row, (row.intensity, row.operations_per_s / 1e9), fontsize="x-small", xytext=(6, -3),
                    textcoords="offset points")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    ax.set_xlabel("operations per byte read or written")
    ax.set_ylabel("Gop/s")
    ax.set_title(f"{limits.bandwidth / 1e9:.1f} GB/s, {limits.threads} threads; area: share of time", fontsize="medium")
    ax.legend(fontsize="small", loc="lower right")
    return ax
