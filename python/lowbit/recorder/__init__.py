# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: every call of an op of this process, in a file that survives the process.

It is off until `start` or ``LOWBIT_RECORD=1`` enables it, and keeps 2048 records by default. docs/recorder.md has the
details.
"""

from __future__ import annotations

import os
import sys

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
    "start",
    "watch",
]


class Records(list[Record]):
    """Calls in order; prints as a table. ``overwritten`` is the number of earlier calls that the ring no longer has."""

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


def start(*, records: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
    """Start recording all calls until the process ends, as ``LOWBIT_RECORD=1`` in the environment does from the first
    call on. If it is already on with these settings, nothing happens.

    The file is created at once. If WORLD_SIZE says that there are several processes, `record_collectives` is called
    too. Forked children record as well, each from its own first call on.

    Args:
        records: the number of calls to keep, 1 to 1048576, rounded up to a power of two and at least 16. None means
            LOWBIT_RECORD, or else 2048.
        folder: the folder of the file, created if it does not exist. None means LOWBIT_RECORD_DIR, or else a private
            folder of the user.

    Raises:
        ValueError: ``records`` is out of range.
        RuntimeError: no file can be created in the folder (the recorder then stays off), or the recorder is on with
            another number of records or in another folder.

    Example:
        >>> lowbit.recorder.start(folder="/scratch/job7")
        >>> lowbit.recorder.path()
        '/scratch/job7/lowbit-node3-4711.ring'
    """
    _C.recorder.start(records, "" if folder is None else os.path.abspath(folder))
    join_ranks()


def join_ranks() -> None:
    """Record collectives too if this process is one of several according to WORLD_SIZE, which torchrun and accelerate
    set."""
    torch = sys.modules.get("torch")  # lowbit has imported it if it is installed
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and torch and torch.distributed.is_available():
        from lowbit.recorder import collectives

        collectives.hook()


def records() -> Records:
    """Return the last calls of this process, oldest first.

    Raises:
        RuntimeError: the recorder is off; the message says how to enable it.

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
    """Return the path of this process's ring.

    It is an empty string if the recorder is off, has recorded no call yet, or could not create a file (`lowbit.info()`
    says which).
    """
    return _C.recorder.state()["path"]


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "lowbit.recorder.dump()") -> str:
    """Write the last calls in the ring to a file that `python -m lowbit recorder` reads; return its path.

    Args:
        path: the file to write; None creates one next to the ring.
        reason: a text stored in the file, at most 512 bytes.

    Raises:
        RuntimeError: the recorder is off, the file cannot be written, or there is no folder for it.
    """
    if path is None:
        return _C.recorder.dump("", reason)
    try:
        with replaced_file(path) as file:
            _C.recorder.dump(os.fspath(file), reason)
    except OSError as error:
        raise RuntimeError(f"dump: cannot write {os.fspath(path)}: {error.strerror or error}") from error
    return os.fspath(path)


def watch(timeout: float = 0) -> None:
    """Start a thread that writes a dump, and a line on stderr, when a call runs for longer than ``timeout`` seconds,
    and on SIGUSR1. If the recorder is off, it is started as by `start`.

    The thread does not need Python, so it works even if the interpreter hangs. A previous handler of SIGUSR1 is called
    too. ``LOWBIT_RECORD_TIMEOUT`` in the environment does the same from the first call on.

    Args:
        timeout: seconds; 0 waits only for the signal. Another call changes it.

    Raises:
        ValueError: ``timeout`` is negative or above 1e9.
        RuntimeError: the recorder was off, and no file can be created.
    """
    _C.recorder.watch(timeout)
    join_ranks()


def record_collectives() -> None:
    """Record torch.distributed's collectives of CPU tensors too, as ops such as ``c10d.all_reduce``. If the recorder is
    off, it is started as by `start`.

    A running recorder does this by itself if WORLD_SIZE says that there are several processes (torchrun, accelerate).
    Otherwise, call it on every rank before the first collective, because collectives are compared by their number in
    the process group. For other devices torch has its own recorder, whose dumps `report` reads.

    Raises:
        RuntimeError: this torch has no torch.distributed, or the recorder was off and no file can be created.
    """
    from lowbit.recorder import collectives

    collectives.hook()
