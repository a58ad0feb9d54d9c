# SPDX-License-Identifier: Apache-2.0
"""Files that are written atomically: after a full disk, an interrupt or a killed process the old file is still
there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path of the same name to write to, in a folder beside ``path``; the file takes its place when the block
    ends, with the bytes on the disk, and keeps the rights of the old one. After an error there is no trace of it.

    More files that the block writes beside it (external data of ONNX) take their places before. The path of a pipe or
    of a device is yielded as it is.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not os.access(target, os.W_OK):  # which a rename would not ask for
        raise PermissionError(f"{path} is there, and must not be written")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield folder / target.name
        for written in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
            with written.open("rb") as file:
                os.fsync(file.fileno())
            place = target.with_name(written.name)
            if place.exists():
                shutil.copymode(place, written)
            os.replace(written, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` by `replaced_file`. Raises OSError."""
    with replaced_file(path) as place:
        place.write_text(text, encoding="utf-8")
