# SPDX-License-Identifier: Apache-2.0
"""CheckpointProgress: the shards of a checkpoint written so far, with their checksums, so that a run can resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowbit.documents.whole_file import write_whole
from lowbit.quant.report import ReportRow
from lowbit.quant.safetensors_file import file_checksum

_FILE = "progress.json"


class CheckpointProgress:
    """The finished shards in ``folder``. A shard whose file is missing counts as unfinished.

    Args:
        folder: the folder of the shards, which has ``progress.json`` if a run was interrupted.
        identity: JSON values that must be equal for a run to resume.

    Raises:
        ValueError: the folder belongs to a run with another identity, or a file in it is damaged. The message names the
            file or folder to remove.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self.rows: dict[str, list[ReportRow]] = {}
        self._checksums: dict[str, int] = {}
        if (folder / _FILE).exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads((self.folder / _FILE).read_text(encoding="utf-8"))
            identity = {what: found[what] for what in self.identity}
            done = {
                name: (shard["crc32"], [ReportRow(**row | {"shape": tuple(row["shape"])}) for row in shard["rows"]])
                for name, shard in found["done"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"quantize_checkpoint: {self.folder / _FILE} of an interrupted run is damaged; remove that folder "
                f"to begin anew: {type(error).__name__}: {error}"
            ) from None
        for what, wanted in self.identity.items():
            if identity[what] != wanted:
                raise ValueError(
                    f"quantize_checkpoint: {self.folder} holds an interrupted run with other {what}; give it the same, "
                    f"or remove that folder: got {wanted}, there {identity[what]}"
                )
        for name, (checksum, rows) in done.items():
            shard = self.folder / name
            if not shard.exists():
                continue
            if file_checksum(shard) != checksum:
                raise ValueError(
                    f"quantize_checkpoint: {shard} of an interrupted run differs from the bytes written: broken disk? "
                    "Remove that file, and the run makes it again"
                )
            self.rows[name], self._checksums[name] = rows, checksum

    def add(self, name: str, checksum: int, rows: list[ReportRow]) -> None:
        """Record that a shard was written."""
        self.rows[name], self._checksums[name] = rows, checksum
        done = {
            name: {"crc32": self._checksums[name], "rows": [asdict(row) for row in rows]}
            for name, rows in self.rows.items()
        }
        write_whole(self.folder / _FILE, json.dumps({**self.identity, "done": done}))

    def remove(self) -> None:
        """Remove the record: the folder is complete."""
        (self.folder / _FILE).unlink()
