# SPDX-License-Identifier: Apache-2.0
"""The limits of this machine, and kernel rows relative to them: a roofline (Williams, Waterman, Patterson, 2009)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from lowbit import _C
from lowbit.tables.pyplot import pyplot

_PROBED_BYTES = 512 << 20
"""More than any cache of one socket."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The measured limits of this machine: memory reads, float32 FMAs, and int8 products in registers, each with all
    threads."""

    threads: int
    bandwidth: float  # bytes per second
    float32: float  # operations per second; a product and its sum are two
    int8: float
    float32_of: str  # the code that was measured
    int8_of: str

    def operations(self, arithmetic: str) -> float:
        return self.int8 if arithmetic == "int8" else self.float32


@cache
def limits(threads: int) -> Limits:
    """Measure the limits of this machine with that many threads, once per process. It takes about a second."""
    bandwidth = max(_C.read_bandwidth(_PROBED_BYTES, streams, threads, 3) for streams in (1, 4))
    float32, int8 = _C.recorder.peak_rate("float", threads), _C.recorder.peak_rate("int8", threads)
    return Limits(
        threads, 1e9 * bandwidth, float32["operations_per_s"], int8["operations_per_s"], float32["what"], int8["what"]
    )


@dataclass(frozen=True, slots=True)
class RowTimes:
    """The calls of one kernel row."""

    op: str
    row: str
    calls: int
    seconds: float
    moved: int  # bytes read and written
    operations: int
    arithmetic: str
    failed: int

    @property
    def bytes_per_s(self) -> float:
        return self.moved / self.seconds if self.seconds else 0.0

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.moved if self.moved else 0.0


def draw(rows: list[RowTimes], limits: Limits, ax: Any) -> Any:
    """Draw the rows that have a count of operations, and the measured limits; return the axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is None:
        _, ax = pyplot("profile.plot").subplots(figsize=(7, 4.5), layout="constrained")
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
