# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: every call of an op of this process, in a file that survives the process.

On by default, 2048 records, 0.1 us a call; ``LOWBIT_FR=0`` turns it off. docs/recorder.md has the rest.
"""

from __future__ import annotations

import os

from lowbit import _C
from lowbit.documents.whole_file import replaced_file
from lowbit.recorder.analysis import Analysis, RankState
from lowbit.recorder.report import Report, report
from lowbit.recorder.ring import Record, Recording, Sizes, parse
from lowbit.tables.table import html_table, text_table

__all__ = [
    "Analysis",
    "RankState",
    "Record",
    "Recording",
    "Records",
    "Report",
    "Sizes",
    "dump",
    "path",
    "record_collectives",
    "records",
    "report",
    "watch",
]


class Records(list[Record]):
    """Calls in order; prints as a table. ``overwritten`` is how many earlier ones the ring has no place for."""

    overwritten: int = 0
    _HEADER = ("#", "op", "row", "sizes", "state", "ms")

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                str(record.sequence),
                "  " * record.depth + record.op,
                record.row,
                record.sizes,
                record.state,
                "" if record.seconds is None else f"{1e3 * record.seconds:.3f}",
            )
            for record in self
        ]

    def __repr__(self) -> str:
        return text_table(self._HEADER, self._cells())

    def _repr_html_(self) -> str:
        return html_table(self._HEADER, self._cells())


def records() -> Records:
    """Return the last calls of this process, oldest first.

    Raises:
        RuntimeError: the recorder is off (LOWBIT_FR=0).

    Example:
        >>> y = layer(x)
        >>> lowbit.recorder.records()[-1].row
        'linear_int4_int8_avx512_vnni'
    """
    recording = parse(_C.recorder.snapshot())
    found = Records(recording.records)
    found.overwritten = recording.overwritten
    return found


def path() -> str:
    """Return the file of this process's ring; an empty string before the first call, and where there is none."""
    return _C.recorder.state()["path"]


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "lowbit.recorder.dump()") -> str:
    """Write the last calls, as the ring has them, into a file that `python -m lowbit recorder` reads; return its path.

    Args:
        path: file to write; None makes one beside the ring.
        reason: text that the file has, of at most 512 bytes.

    Raises:
        RuntimeError: the recorder is off, the file cannot be written, or there is no folder to make one in.
    """
    if path is None:
        return _C.recorder.dump("", reason)
    try:
        with replaced_file(path) as place:
            _C.recorder.dump(os.fspath(place), reason)
    except OSError as error:
        raise RuntimeError(f"dump: cannot write {os.fspath(path)}: {error.strerror or error}") from error
    return os.fspath(path)


def watch(timeout: float = 0) -> None:
    """Have a thread write a dump, and a line on stderr, where a call runs for longer than ``timeout`` seconds,
    and on SIGUSR1.

    The thread does not need Python: it works where the interpreter hangs. A handler of SIGUSR1 that was there is called
    too. ``LOWBIT_FR_TIMEOUT`` in the environment does the same from the first call on.

    Args:
        timeout: seconds; 0 waits for the signal alone. Calling again sets another one.

    Raises:
        ValueError: timeout is negative, or more than 1e9.
        RuntimeError: the recorder is off (LOWBIT_FR=0).
    """
    _C.recorder.watch(timeout)


def record_collectives() -> None:
    """Record torch.distributed's collectives of CPU tensors too, from now on, as ops ``c10d.all_reduce`` and others.

    Done at import where WORLD_SIZE says that there are several processes (torchrun, accelerate). Elsewhere call it
    before the first collective, on every rank: they are compared by their number in the process group. Of other devices
    torch keeps its own recorder, whose dumps `report` reads.

    Raises:
        RuntimeError: this torch has no torch.distributed.
    """
    from lowbit.recorder import collectives

    collectives.hook()
