# SPDX-License-Identifier: Apache-2.0
"""The JSON that a flight recorder dumps (csrc/recorder/dump.cpp), as Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.documents.declared import as_declared
from lowbit.recorder.ring import VERSION, Record, Recording, RecordingError, Sizes


@dataclass(frozen=True, slots=True)
class _DumpedRecord:
    """One call, as the file has it."""

    sequence: int
    op: str
    row: str
    state: str
    device: str
    index: int
    stream: int
    thread: int
    depth: int
    start_ns: int
    end_ns: int
    arithmetic: str
    read: int
    written: int
    operations: int
    group_sequence: int
    tensors: tuple[Sizes, ...]

    def record(self) -> Record:
        device = self.device if self.device == "cpu" else f"{self.device}:{self.index}"
        return Record(
            self.sequence, self.op, self.row, self.state, device, self.stream, self.thread, self.depth, self.start_ns,
            self.end_ns, self.arithmetic, self.read, self.written, self.operations, self.group_sequence, self.tensors,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Dump:
    """The whole file."""

    lowbit_recorder: int
    reason: str
    host: str
    pid: int
    rank: int
    world: int
    wall_ns: int
    monotonic_ns: int
    taken_ns: int
    capacity: int
    next: int
    lost: int
    command_line: tuple[str, ...]
    records: tuple[_DumpedRecord, ...]


def from_dump(content: dict[str, Any], path: str) -> Recording:
    """The JSON that a dump has, as `read_ring` would give it.

    Raises:
        RecordingError: another version; something is missing, unknown or of another type.
    """
    version = content.get("lowbit_recorder")
    if version != VERSION:
        raise RecordingError(f"{path}: version {version} of the recorder's dumps, this lowbit reads version {VERSION}")
    try:
        dump = as_declared(_Dump, content, "dump")
    except ValueError as error:
        raise RecordingError(f"{path}: a damaged dump of lowbit's recorder: {error}") from None
    records = sorted((record.record() for record in dump.records), key=lambda record: record.sequence)
    return Recording(
        path, dump.host, dump.pid, dump.rank, dump.world, dump.wall_ns, dump.monotonic_ns, dump.taken_ns,
        dump.command_line, dump.capacity, dump.next, dump.lost, 0, tuple(records),
    )  # fmt: skip
