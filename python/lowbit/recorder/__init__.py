# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: every call of an op of this process, in a file that survives the process.

Off until `start` or ``LOWBIT_RECORD=1`` turns it on; then 2048 records, 0.1 us a call. docs/recorder.md has the rest.
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


def start(*, records: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
    """Turn the recorder on, for all calls from now on until the process ends, as ``LOWBIT_RECORD=1`` in the environment
    does from the first call on. Where it is on already, nothing happens.

    It makes its file at once. Where WORLD_SIZE says that there are several processes, it is `record_collectives` too.
    Forked children record as well, each from its own first call on.

    Args:
        records: the number of calls to keep, 1 to 1048576, rounded up to a power of two and at least 16; None: what
            LOWBIT_RECORD says, else 2048.
        folder: folder of the file, made if it is not there; None: LOWBIT_RECORD_DIR, else one of this user alone.

    Raises:
        ValueError: records is out of that range.
        RuntimeError: no file can be made in the folder (the recorder then stays off), or the recorder is on already,
            with other records or in another folder.

    Example:
        >>> lowbit.recorder.start(folder="/scratch/job7")
        >>> lowbit.recorder.path()
        '/scratch/job7/lowbit-node3-4711.ring'
    """
    _C.recorder.start(records, "" if folder is None else os.path.abspath(folder))
    join_ranks()


def join_ranks() -> None:
    """Record collectives too if this process is one of several, as WORLD_SIZE of torchrun and accelerate says."""
    torch = sys.modules.get("torch")  # lowbit has imported it where it is installed
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and torch and torch.distributed.is_available():
        from lowbit.recorder import collectives

        collectives.hook()


def records() -> Records:
    """Return the last calls of this process, oldest first.

    Raises:
        RuntimeError: the recorder is off; the message says how to turn it on.

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
    """Return the file of this process's ring; an empty string where there is none: the recorder is off, has recorded no
    call yet, or found no place for a file (`lowbit.info()` says which).
    """
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
    and on SIGUSR1. Without a recorder it would see no call, so it starts one that is off, as `start` does.

    The thread does not need Python: it works where the interpreter hangs. A handler of SIGUSR1 that was there is called
    too. ``LOWBIT_RECORD_TIMEOUT`` in the environment does the same from the first call on.

    Args:
        timeout: seconds; 0 waits for the signal alone. Calling again sets another one.

    Raises:
        ValueError: timeout is negative, or more than 1e9.
        RuntimeError: the recorder was off, and no file can be made.
    """
    _C.recorder.watch(timeout)
    join_ranks()


def record_collectives() -> None:
    """Record torch.distributed's collectives of CPU tensors too, from now on, as ops ``c10d.all_reduce`` and others. It
    starts a recorder that is off, as `start` does.

    A recorder that is on does it by itself where WORLD_SIZE says that there are several processes (torchrun,
    accelerate). Elsewhere call it before the first collective, on every rank: they are compared by their number in the
    process group. Of other devices torch keeps its own recorder, whose dumps `report` reads.

    Raises:
        RuntimeError: this torch has no torch.distributed, or the recorder was off, and no file can be made.
    """
    from lowbit.recorder import collectives

    collectives.hook()
