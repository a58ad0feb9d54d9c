# SPDX-License-Identifier: Apache-2.0
"""OpenFile: a file whose bytes are read by offset. It is not mapped, because truncating a mapped file would crash the
process."""

from __future__ import annotations

import os
import weakref
from pathlib import Path


class OpenFile:
    """A file that stays open while it is referenced, even if another file takes its name.

    Raises:
        OSError: it does not exist or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path.open("rb", buffering=0)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self._state = self._now()

    @property
    def size(self) -> int:
        """The size of the file in bytes when it was opened."""
        return self._state[0]

    def read(self, begin: int, count: int) -> bytearray:
        """Return ``count`` bytes from byte ``begin`` on.

        Raises:
            ValueError: the file ends before.
        """
        data = bytearray(count)
        memory, done = memoryview(data), 0
        while done < count:
            got = os.preadv(self._descriptor, [memory[done:]], begin + done)
            if not got:
                raise ValueError(
                    f"{self.path}: the file must have {begin + count} bytes, got {begin + done}: it was cut"
                )
            done += got
        return data

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was written to since it was opened."""
        if self._now() != self._state:
            raise ValueError(f"{self.path}: the file must stay as it is while it is read, and was written meanwhile")

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns
