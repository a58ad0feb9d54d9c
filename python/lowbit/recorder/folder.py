# SPDX-License-Identifier: Apache-2.0
"""Everything that recorders wrote to a folder: rings, dumps, dumps of torch's recorder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lowbit.recorder.ring import MAGIC, Recording, RecordingError, read_ring
from lowbit.recorder.torch_dumps import from_torch, unpickle


@dataclass(frozen=True, slots=True)
class Folder:
    """Recordings of a folder, and a sentence for each file that could not be read."""

    path: str
    recordings: tuple[Recording, ...]
    problems: tuple[str, ...]


def read_folder(path: str | Path) -> Folder:
    """Read every file of a folder; one that is damaged or no recording is a problem, and the others are still read.

    Raises:
        FileNotFoundError: there is no such folder, or nothing in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"recorder: {folder} is not a folder")
    recordings, problems = [], []
    for file in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        try:
            recordings.append(read_file(file))
        except RecordingError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{file}: {error.strerror}")
    if not recordings and not problems:
        raise FileNotFoundError(f"recorder: there is no file in {folder}")
    return Folder(str(folder), tuple(recordings), tuple(problems))


def read_file(path: Path) -> Recording:
    """Read one file, whichever kind it is by its first bytes.

    Raises:
        RecordingError: it is of no kind, or damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix in (".ring", ".dump") or start == MAGIC:
        return read_ring(path)
    content = path.read_bytes()
    if start.startswith(b"\x80"):
        return from_torch(unpickle(content, str(path)), str(path))
    if not start.lstrip().startswith(b"{"):
        raise RecordingError(f"{path}: no recording of lowbit, and no dump of torch")
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: cut short or no JSON: {error}") from error
    return from_torch(loaded, str(path))
