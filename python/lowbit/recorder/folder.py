# SPDX-License-Identifier: Apache-2.0
"""All that recorders wrote to a folder: rings, dumps, and dumps of torch's recorder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lowbit.recorder.ring import MAGIC, Recording, RecordingError, read_ring
from lowbit.recorder.torch_dumps import from_torch, unpickle


@dataclass(frozen=True, slots=True)
class Folder:
    """The recordings of a folder, and a sentence for each file that could not be read."""

    path: str
    recordings: tuple[Recording, ...]
    problems: tuple[str, ...]


def read_folder(path: str | Path) -> Folder:
    """Read every file of a folder. A file that is damaged or not a recording is listed as a problem, and the others are
    still read.

    Raises:
        FileNotFoundError: the folder does not exist or is empty.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"recorder: path must be a folder, got {folder}")
    recordings, problems = [], []
    for file in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        try:
            recordings.append(read_file(file))
        except RecordingError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{file}: {error.strerror}")
    if not recordings and not problems:
        raise FileNotFoundError(f"recorder: path must be a folder with recordings, got {folder}, which has no file")
    return Folder(str(folder), tuple(recordings), tuple(problems))


def read_file(path: Path) -> Recording:
    """Read one file, whose kind is determined by its first bytes.

    Raises:
        RecordingError: the file is of no known kind, or damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix in (".ring", ".dump") or start == MAGIC:
        return read_ring(path)
    content = path.read_bytes()
    if start.startswith(b"\x80"):
        return from_torch(unpickle(content, str(path)), str(path))
    if not start.lstrip().startswith(b"{"):
        raise RecordingError(
            f"{path}: must be a recording of lowbit or a dump of torch's flight recorder, and is neither"
        )
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: must be JSON: {error}; it may be cut short") from error
    return from_torch(loaded, str(path))
