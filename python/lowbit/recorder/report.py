# SPDX-License-Identifier: Apache-2.0
"""An analysis as text and JSON, and the command `python -m lowbit recorder`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lowbit import _C
from lowbit.documents.whole_file import write_whole
from lowbit.recorder.analysis import Analysis, Difference, RankState, analyse
from lowbit.recorder.folder import read_folder
from lowbit.recorder.ring import Record
from lowbit.recorder.trace import trace_of


class Report(str):
    """The text of an analysis; ``analysis`` has the details."""

    __slots__ = ("analysis",)
    analysis: Analysis


def report(folder: str | Path | None = None, *, json_file: str | None = None, trace_file: str | None = None) -> Report:
    """Read a folder of recordings and report where every rank is, where they first differ, and which one is to blame.

    Args:
        folder: the folder of rings, dumps, and dumps of torch's recorder, of any number of ranks; None means the folder
            where this process would write its own.
        json_file: a file for the same as JSON.
        trace_file: a file for the timeline, in the format of torch.profiler's traces, which https://ui.perfetto.dev and
            chrome://tracing open.

    Raises:
        FileNotFoundError: the folder does not exist or is empty.
    """
    found = read_folder(_default_folder() if folder is None else folder)
    analysis = analyse(found)
    if json_file:
        write_whole(json_file, json.dumps(dataclasses.asdict(analysis), indent=1) + "\n")
    if trace_file:
        write_whole(trace_file, json.dumps(trace_of(found.recordings)))
    made = Report(text(analysis))
    made.analysis = analysis
    return made


def _default_folder() -> str:
    folder = _C.recorder.state()["folder"]
    if not Path(folder).exists():
        raise FileNotFoundError(
            f"recorder: there is no folder {folder}: nothing was recorded (LOWBIT_RECORD=1 turns the recorder on)"
        )
    return folder


def text(analysis: Analysis) -> str:
    """Return the findings as text."""
    lines = [line for state in analysis.ranks for line in _state_lines(state)]
    lines += _difference_lines("first call that differs", analysis.call)
    lines += _difference_lines("first collective that differs", analysis.collective)
    lines += [f"not read: {problem}" for problem in analysis.problems]
    return "\n".join([*lines, f"verdict: {analysis.verdict}"])


def _state_lines(state: RankState) -> list[str]:
    kept = f"{state.calls} calls, {state.overwritten} of them overwritten"
    kept += f", {state.lost} lost" if state.lost else ""
    process = f"pid {state.pid} on {state.host}, {'alive' if state.is_alive else 'gone'}" if state.pid else "torch's"
    name = state.name if state.rank >= 0 else "no rank"
    return [
        f"{name}: {process}; {kept}; {Path(state.path).name}",
        f"  last finished     {_told(state.last_finished)}",
        f"  first unfinished  {_told(state.unfinished)}"
        + ("" if state.age_s is None else f", for {state.age_s:.3f} s{'' if state.is_alive else ' at least'}"),
        *([f"  failed            {_told(state.failed)}"] if state.failed else []),
    ]


def _told(record: Record | None) -> str:
    if record is None:
        return "none"
    return f"{record} on {record.device}" if record.device not in ("", "cpu") else str(record)


def _difference_lines(title: str, difference: Difference | None) -> list[str]:
    if difference is None:
        return []
    lines = [f"{title}: {difference.what} number {difference.number}, {difference.kind}"]
    for rank, record in difference.records.items():
        blame = "  <- differs" if rank in difference.culprits else ""
        lines.append(f"  rank {rank}: {_told(record)}{blame}")
    return lines
