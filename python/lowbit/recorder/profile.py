# SPDX-License-Identifier: Apache-2.0
"""profile: the kernel rows that ran, how often, for how long, and how close to the machine's limits."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from lowbit import _C
from lowbit.recorder.ring import Names, Record, records_in
from lowbit.recorder.roofline import RowTimes, draw, limits
from lowbit.tables.table import html_table, text_table

_TORCH_OPS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class TorchOp:
    """The time of a torch op itself, without the ops that it called."""

    name: str
    calls: int
    seconds: float


class ProfileTable(list[RowTimes]):
    """One kernel row per entry, by descending time; prints as a table. Its last line counts nested calls only once."""

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
        lines.append((f"all, of {1e3 * all_seconds:.3f} ms", str(len(outer)), *total, "", "", "", "", "", ""))
        return lines + [self._plain(*rest) for rest in self._profile.between(seconds)]

    def _plain(self, name: str, calls: int | None, seconds: float) -> tuple[str, ...]:
        mean = "" if calls is None else f"{1e6 * seconds / calls:.1f}"
        share = f"{seconds / self._profile.seconds:.0%}"
        return (name, "" if calls is None else str(calls), f"{1e3 * seconds:.3f}", share, mean, "", "", "", "", "")

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
    """Record every call of a lowbit op, in all threads, while the block runs.

    Args:
        torch_ops: whether to report the remaining time too, by torch op and for Python. It uses torch's own profiler,
            which makes each op about a microsecond slower.

    Attributes:
        records: the calls, in order (`lowbit.recorder.Record`).
        seconds: the wall time of the block.
        torch_ops: with ``torch_ops=True``, the ops of torch by descending time; those of lowbit are ``lowbit::...``,
            and include their kernel rows.

    Raises:
        RuntimeError: the profile is entered twice, or asked for its table before the block has ended.

    Example:
        >>> with lowbit.profile() as p:
        ...     model(x)
        >>> print(p.table())
    """

    def __init__(self, *, torch_ops: bool = False) -> None:
        self.records: list[Record] = []
        self.torch_ops: list[TorchOp] = []
        self._torch = _torch_profiler() if torch_ops else None
        self.seconds = 0.0
        self._from: int | None = None
        self._ended = False

    def __enter__(self) -> profile:
        if self._from is not None:
            raise RuntimeError("profile: must be entered once, got a second time; make another one")
        if self._torch is not None:
            self._torch.__enter__()
        self._from = _C.recorder.begin_profile()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        content = _C.recorder.end_profile(self._from)
        self.records, _ = records_in(content, Names(**json.loads(_C.recorder.NAMES)))
        if self._torch is not None:
            self._torch.__exit__(None, None, None)
            averages = self._torch.key_averages()
            ops = [TorchOp(of.key, of.count, 1e-6 * of.self_cpu_time_total) for of in averages]
            self.torch_ops = sorted(ops, key=lambda op: -op.seconds)
        self._ended = True

    def between(self, in_rows: float) -> list[tuple[str, int | None, float]]:
        """Return the time outside of kernel rows by op: names, calls and seconds. Without torch_ops it is empty."""
        if self._torch is None:
            return []
        ours = [op for op in self.torch_ops if op.name.startswith("lowbit::")]
        others = [op for op in self.torch_ops if op not in ours]
        shown, rest = others[:_TORCH_OPS_SHOWN], others[_TORCH_OPS_SHOWN:]
        lines = [(op.name, op.calls, op.seconds) for op in shown]
        if rest:
            lines.append(("other ops of torch", sum(op.calls for op in rest), sum(op.seconds for op in rest)))
        in_ops = sum(op.seconds for op in ours)
        if ours:  # rows run outside of torch's dispatcher belong to no op
            lines.append(("lowbit's ops around rows", sum(op.calls for op in ours), max(0.0, in_ops - in_rows)))
        return [*lines, ("Python", None, self.seconds - max(in_ops, in_rows) - sum(op.seconds for op in others))]

    def rows(self) -> list[RowTimes]:
        """Return the calls by kernel row, by descending time. It needs no limits, which take a second to measure."""
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
        """Return the kernel rows with their shares of this machine's limits (measured in the first call, which takes a
        second)."""
        return ProfileTable(self.rows(), self)

    def plot(self, ax: Any = None) -> Any:
        """Draw the roofline and return the axes: each row's operations per second over its operations per byte, below
        the limits of memory and arithmetic. Rows without a count of operations are only in the table.

        Args:
            ax: matplotlib axes to draw into; None creates new ones.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw(self.rows(), limits(_C.threads()["count"]), ax)

    def _check_ended(self, what: str) -> None:
        if not self._ended:
            raise RuntimeError(f"profile.{what}: the `with` block must have ended")

    def __repr__(self) -> str:
        return repr(self.table()) if self._ended else "profile: has not ended"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() if self._ended else "<p>profile: has not ended</p>"


def _torch_profiler() -> Any:
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
