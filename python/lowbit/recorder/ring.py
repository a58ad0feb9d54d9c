# SPDX-License-Identifier: Apache-2.0
"""The file of a flight recorder (csrc/recorder/record.hpp) as Python objects.

Reading does not depend on this machine: the names of dtypes, devices and states are in the file.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowbit import _C
from lowbit.documents.declared import as_declared

MAGIC = b"lowbitFR"
VERSION = 1
HEADER_BYTES = 4096
_HEAD = struct.Struct("<8s4I3iI2Q")  # magic .. monotonic_ns
_COUNTS = struct.Struct("<2Q")  # next, lost, at 64
_TAKEN = struct.Struct("<Q")  # time of a dump, at 3072
_SEQUENCE_BITS = 44  # low bits of next; the high bits count slots that were skipped
_TEXTS = ((128, 64), (256, 768), (1024, 2048), (3080, 512))  # host, names, command line, reason
_RECORD = struct.Struct("<3QI2Bh2B3B3BQ12q3q32s48siI")
RECORD_BYTES = _RECORD.size
_TENSORS, _SIZES = 3, 4
_BEING_WRITTEN = (1 << 64) - 1
BETWEEN_TWO = {"c10d.send", "c10d.recv", "c10d.recv_any_source"}
MOST_RANKS = 1 << 20
"""The max number of ranks accepted, well above the size of any run."""


class RecordingError(ValueError):
    """An error for a file that is not a complete recording. It names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The dtype and shape of one tensor; the last four dimensions if it has more."""

    dtype: str
    shape: tuple[int, ...]
    rank: int

    def __str__(self) -> str:
        more = "..., " if self.rank > len(self.shape) else ""
        return f"{self.dtype} [{more}{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Record:
    """One call. Times are nanoseconds of the machine's monotonic clock; ``end_ns`` is 0 if the call has not ended."""

    sequence: int
    op: str
    row: str
    state: str  # started, finished or failed
    device: str
    stream: int
    thread: int
    depth: int
    start_ns: int
    end_ns: int
    arithmetic: str  # float, int8 or empty
    read: int
    written: int
    operations: int
    group_sequence: int
    tensors: tuple[Sizes, ...]

    @property
    def seconds(self) -> float | None:
        """The duration in seconds, or None if the call has not ended."""
        return (self.end_ns - self.start_ns) / 1e9 if self.end_ns else None

    @property
    def is_collective(self) -> bool:
        return self.op.startswith("c10d.")

    @property
    def is_between_two(self) -> bool:
        """Whether it is a send or receive. Not every rank of the group makes it, and gloo does not report its end."""
        return self.op in BETWEEN_TWO

    @property
    def group(self) -> str:
        """The name of the process group of a collective."""
        return self.row.partition(":")[2]

    @property
    def sizes(self) -> str:
        return ", ".join(map(str, self.tensors))

    def __str__(self) -> str:
        return f"#{self.sequence} {self.op} ({self.row}) {self.sizes}".rstrip()


@dataclass(frozen=True, slots=True)
class Recording:
    """The records of one process by sequence number, and facts about the process."""

    path: str
    host: str
    pid: int
    rank: int  # -1 if unknown
    world: int  # 0 if unknown
    wall_ns: int  # the same moment as monotonic_ns
    monotonic_ns: int
    taken_ns: int  # when the records were read or dumped, monotonic; 0 if the process had ended
    command_line: tuple[str, ...]
    capacity: int
    calls: int  # in total
    lost: int  # calls without a slot, because every slot had a running call
    torn: int  # records that were being written
    records: tuple[Record, ...]
    reason: str = ""  # why a dump was written

    def __post_init__(self) -> None:
        """Check the numbers, because a damaged file could make other code create lists of any length.

        Raises:
            RecordingError: rank or world is out of range.
        """
        if not (-1 <= self.rank < MOST_RANKS and 0 <= self.world <= MOST_RANKS):
            raise RecordingError(
                f"{self.path}: damaged: rank and world must be below {MOST_RANKS}, got {self.rank} and {self.world}"
            )

    @property
    def is_alive(self) -> bool:
        return self.taken_ns > 0

    @property
    def overwritten(self) -> int:
        """The number of calls whose records are gone."""
        return self.calls - len(self.records) - self.torn - self.lost

    def wall(self, monotonic_ns: int) -> int:
        return self.wall_ns + monotonic_ns - self.monotonic_ns

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else f"pid {self.pid}"


def read_ring(path: str | Path) -> Recording:
    """Read the file of a recorder, whose process may be running or have ended, or a dump.

    Raises:
        RecordingError: it is not a recording, is truncated, or has another version.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read()
    recording = parse(content, str(path))
    if recording.taken_ns:  # a dump
        return recording
    return replace(recording, taken_ns=_now_there(recording) if _is_running(path, recording) else 0)


def _is_running(path: str | Path, recording: Recording) -> bool:
    """Whether the process of a ring is running: it holds the file."""
    ended = (
        recording.host == socket.gethostname()
        and Path("/proc/self").exists()
        and not Path(f"/proc/{recording.pid}").exists()
    )
    return not ended and _C.recorder.is_held(os.path.realpath(path))


def _now_there(recording: Recording) -> int:
    """Return the current monotonic time of the recording's machine, derived from this machine's wall clock."""
    if recording.host == socket.gethostname():
        return time.monotonic_ns()
    return recording.monotonic_ns + time.time_ns() - recording.wall_ns


def parse(content: bytes, path: str = "") -> Recording:
    """Read the bytes of a ring.

    Raises:
        RecordingError: for the reasons of `read_ring`.
    """
    if len(content) < HEADER_BYTES or not content.startswith(MAGIC):
        what = "cut short" if content and MAGIC.startswith(content[:8]) else "not the file of a lowbit recorder"
        raise RecordingError(f"{path}: {what} ({len(content)} bytes)")
    _, version, header_bytes, record_bytes, capacity, pid, rank, world, _, wall_ns, monotonic_ns = _HEAD.unpack_from(
        content
    )
    if version != VERSION:
        raise RecordingError(f"{path}: the version of the recorder's file must be {VERSION}, got {version}")
    if header_bytes != HEADER_BYTES or record_bytes != RECORD_BYTES or len(content) < HEADER_BYTES:
        raise RecordingError(
            f"{path}: records must have {RECORD_BYTES} bytes, got {record_bytes}: the header is damaged"
        )
    wanted = HEADER_BYTES + capacity * RECORD_BYTES
    if len(content) < wanted:
        raise RecordingError(f"{path}: must have {wanted} bytes, got {len(content)}: it is cut short")
    counts, lost = _COUNTS.unpack_from(content, 64)
    host, names, command_line, reason = (content[at : at + room] for at, room in _TEXTS)
    try:
        named = as_declared(Names, json.loads(_text(names)), "names")
    except ValueError as error:
        raise RecordingError(f"{path}: the header is damaged: {error}") from error
    records, torn = records_in(content[HEADER_BYTES:wanted], named)
    return Recording(
        path, _text(host), pid, rank, world, wall_ns, monotonic_ns, _TAKEN.unpack_from(content, 3072)[0],
        tuple(part.decode(errors="replace") for part in command_line.rstrip(b"\0").split(b"\0")),
        capacity, counts & (1 << _SEQUENCE_BITS) - 1, lost, torn,
        tuple(sorted(records, key=lambda record: record.sequence)), _text(reason),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """The names for the numbers in a record, from the header of its file."""

    state: list[str]
    dtype: list[str]
    device: list[str]
    arithmetic: list[str]


def records_in(content: bytes, names: Names) -> tuple[list[Record], int]:
    """Return the complete records in the order of their slots, and the number of those that were being written."""
    records, torn = [], 0
    for fields in _RECORD.iter_unpack(content):
        mark, tail = fields[0], fields[-1]
        if mark == 0:
            continue
        if mark == _BEING_WRITTEN or mark & 0xFFFFFFFF != tail:
            torn += 1
            continue
        records.append(_record(fields, names))
    return records, torn


def _record(fields: tuple[Any, ...], names: Names) -> Record:
    mark, start, end, thread, state, device_type, device_index, depth, arithmetic = fields[:9]
    dtypes, ranks, stream, sizes = fields[9:12], fields[12:15], fields[15], fields[16:28]
    read, written, operations, op, row, group_sequence = fields[28:34]
    tensors = []
    for i in range(_TENSORS):
        dtype = _name(names.dtype, dtypes[i])
        if dtype == "other":
            break
        shape = sizes[_SIZES * i : _SIZES * i + min(ranks[i], _SIZES)]
        tensors.append(Sizes(dtype, tuple(shape), ranks[i]))
    device = _name(names.device, device_type)
    return Record(
        mark - 1, _text(op), _text(row), _name(names.state, state),
        device if device == "cpu" else f"{device}:{device_index}",
        stream, thread, depth, start, end, _name(names.arithmetic, arithmetic),
        read, written, operations, group_sequence, tuple(tensors),
    )  # fmt: skip


def _name(names: list[str], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")
