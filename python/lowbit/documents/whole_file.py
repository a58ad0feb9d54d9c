# SPDX-License-Identifier: Apache-2.0
"""Files that are written atomically: after a full disk, an interrupt or a killed process, the old file is still
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
    """Yield a path of the same name to write to, in a temporary folder next to ``path``. When the block ends, the file
    is flushed to disk and replaces the old one, whose permissions it keeps. After an error, no trace of it is left.

    Other files that the block writes next to it (external data of ONNX) are moved first. The path of a pipe or a device
    is yielded unchanged.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not os.access(target, os.W_OK):  # a rename would not require this permission
        raise PermissionError(f"{path} must be writable, got a file without write permission")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield folder / target.name
        for written in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
            with written.open("rb") as file:
                os.fsync(file.fileno())
            destination = target.with_name(written.name)
            if destination.exists():
                shutil.copymode(destination, written)
            os.replace(written, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder to write files to. When the block ends, they are flushed to disk and the folder becomes
    ``path``, which must not exist. After an error, no trace of it is left.

    Raises:
        OSError: the folder cannot be written, or ``path`` exists.
    """
    target = Path(os.path.abspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        folder = around / target.name
        folder.mkdir()
        yield folder
        for written in folder.iterdir():
            with written.open("rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            raise FileExistsError(f"{path} exists")
        os.rename(folder, target)
    finally:
        shutil.rmtree(around, ignore_errors=True)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` through `replaced_file`, which may raise OSError."""
    with replaced_file(path) as destination:
        destination.write_text(text, encoding="utf-8")
