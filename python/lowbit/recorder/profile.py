# SPDX-License-Identifier: Apache-2.0
"""Which rows ran, how often, how long, and how far from what this machine can do at most."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

from lowbit import _C
from lowbit.recorder.ring import Names, Record, records_in
from lowbit.recorder.roofline import RowTimes, draw, limits
from lowbit.tables.table import html_table, text_table


class ProfileTable(list[RowTimes]):
    """A row of kernels per entry, the longest first; prints as a table, whose last line counts a call inside of
    another one once."""

    def __init__(self, entries: list[RowTimes], profile: profile) -> None:
        super().__init__(entries)
        self._profile, self._limits = profile, limits(_C.threads()["count"])

    _HEADER = ("row", "calls", "total ms", "of all", "mean us", "GB/s", "of limit", "Gop/s", "of limit", "")

    def _cells(self) -> list[tuple[str, ...]]:
        all_seconds = self._profile.seconds
        lines = []
        for entry in self:
            most = self._limits.operations(entry.arithmetic)
            counted = entry.operations > 0
            lines.append((
                entry.row, str(entry.calls), f"{1e3 * entry.seconds:.3f}", f"{entry.seconds / all_seconds:.0%}",
                f"{1e6 * entry.seconds / entry.calls:.1f}", f"{entry.bytes_per_s / 1e9:.2f}",
                f"{entry.bytes_per_s / self._limits.bandwidth:.0%}",
                f"{entry.operations_per_s / 1e9:.1f}" if counted else "",
                f"{entry.operations_per_s / most:.0%}" if counted else "",
                " ".join(part for part in (entry.arithmetic, f"{entry.failed} failed" if entry.failed else "") if part),
            ))  # fmt: skip
        outer = [record for record in self._profile.records if record.depth == 0]
        seconds = sum(record.seconds or 0.0 for record in outer)
        total = (f"{1e3 * seconds:.3f}", f"{seconds / all_seconds:.0%}")
        return [*lines, (f"all, of {1e3 * all_seconds:.3f} ms", str(len(outer)), *total, "", "", "", "", "", "")]

    def _note(self) -> str:
        of = self._limits
        return (
            f"limits, on {of.threads} threads: {of.bandwidth / 1e9:.1f} GB/s read; {of.float32 / 1e9:.0f} Gop/s "
            f"({of.float32_of}); {of.int8 / 1e9:.0f} Gop/s ({of.int8_of})"
        )

    def __repr__(self) -> str:
        return text_table(self._HEADER, self._cells()) + "\n" + self._note()

    def _repr_html_(self) -> str:
        return html_table(self._HEADER, self._cells()) + f"<p>{self._note()}</p>"


class profile:
    """Keep every call of an op of lowbit, of all threads, while the block runs.

    Attributes:
        records: the calls, in order (`lowbit.recorder.Record`).
        seconds: how long the block took.

    Raises:
        RuntimeError: a profile is entered twice, or asked for its table before its block has ended.

    Example:
        >>> with lowbit.profile() as p:
        ...     model(x)
        >>> print(p.table())
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.seconds = 0.0
        self._from: int | None = None
        self._ended = False

    def __enter__(self) -> profile:
        if self._from is not None:
            raise RuntimeError("profile: it has been entered already; make another one")
        self._from = _C.recorder.begin_profile()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        content = _C.recorder.end_profile(self._from)
        self.records, _ = records_in(content, Names(**json.loads(_C.recorder.NAMES)))
        self._ended = True

    def rows(self) -> list[RowTimes]:
        """Return the calls by row, the longest first; without limits, which take a second to measure."""
        self._check_ended("rows")
        calls: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in self.records:
            calls[record.op, record.row].append(record)
        found = [
            RowTimes(
                op, row, len(of), sum(record.seconds or 0.0 for record in of),
                sum(record.read + record.written for record in of), sum(record.operations for record in of),
                of[0].arithmetic, sum(record.state == "failed" for record in of),
            )
            for (op, row), of in calls.items()
        ]  # fmt: skip
        return sorted(found, key=lambda row: -row.seconds)

    def table(self) -> ProfileTable:
        """Return the rows with their shares of this machine's limits (measured at the first call, a second)."""
        return ProfileTable(self.rows(), self)

    def plot(self, ax: Any = None) -> Any:
        """Draw the roofline: what each row computed in a second over its operations per byte, below what memory and
        arithmetic allow; return the axes. Rows whose products are not counted are in the table alone.

        Args:
            ax: axes of matplotlib to draw into; None makes new ones.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw(self.rows(), limits(_C.threads()["count"]), ax)

    def _check_ended(self, what: str) -> None:
        if not self._ended:
            raise RuntimeError(f"profile.{what}: the block has not ended")

    def __repr__(self) -> str:
        return repr(self.table()) if self._ended else "profile: has not ended"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() if self._ended else "<p>profile: has not ended</p>"
