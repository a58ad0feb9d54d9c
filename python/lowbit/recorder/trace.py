# SPDX-License-Identifier: Apache-2.0
"""The timeline of recordings in torch.profiler's format: Chrome trace events, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.recorder.ring import Record, Recording


def trace_of(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the timeline, with a track for each thread of each process, by the wall clock of its machine.

    A call that has not ended becomes an event without an end (phase "B"), which viewers draw up to the right edge.
    """
    begin = min((of.wall(record.start_ns) for of in recordings for record in of.records), default=0)
    events: list[dict[str, Any]] = []
    for number, of in enumerate(recordings):
        for name, value in (("process_name", f"{of.name}, {of.host} {of.pid}"), ("process_sort_index", of.rank)):
            events.append({"ph": "M", "name": name, "pid": number, "args": {name.removeprefix("process_"): value}})
        events += [{"pid": number} | _event(record, of.wall(record.start_ns) - begin) for record in of.records]
    return {"baseTimeNanoseconds": begin, "displayTimeUnit": "ns", "traceEvents": events}


def _event(record: Record, start_ns: int) -> dict[str, Any]:
    ended = {"ph": "X", "dur": max(record.end_ns - record.start_ns, 0) / 1e3}  # 0 if torch's recorder does not know it
    facts = {"sequence": record.sequence, "row": record.row, "sizes": record.sizes, "state": record.state}
    kind = "collective" if record.is_collective else "op"
    event = {"name": record.op, "cat": kind, "tid": record.thread, "ts": start_ns / 1e3, "args": facts}
    return event | ({"ph": "B"} if record.state == "started" else ended)
