# SPDX-License-Identifier: Apache-2.0
"""write_shards: write the safetensors files of a checkpoint with their index, with one part in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lowbit.quant.safetensors_file import INDEX, SINGLE, Entry, bytes_of, write_safetensors

_LARGEST = 5_000_000_000  # bytes of a file, as on the Hugging Face Hub


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are made together, when they are written.

    Args:
        entries: what the header of the file says of them, by name.
        make: returns them by name.
    """

    entries: Mapping[str, Entry]
    make: Callable[[], dict[str, Tensor]]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Part:
        """Return the part of a tensor that is in memory."""
        return cls({key: Entry.of(tensor)}, lambda: {key: tensor})

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def chunks(self) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each tensor; all are made when the first is read."""
        made: dict[str, Tensor] = {}

        def of(key: str) -> Iterator[memoryview]:
            if not made:
                made.update(self.make())
            tensor = made.pop(key).detach().cpu().contiguous()
            yield bytes_of(tensor)

        yield from map(of, self.entries)


def write_shards(folder: Path, parts: Iterable[Part], metadata: Mapping[str, str]) -> None:
    """Write ``model.safetensors``, or several files of 5 GB and their index, into a folder.

    Args:
        folder: an empty folder.
        parts: the tensors, in the order in which they are written.
        metadata: the ``__metadata__`` of each file.
    """
    shards: list[list[Part]] = [[]]
    for part in parts:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + part.nbytes > _LARGEST:
            shards.append([])
        shards[-1].append(part)
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        entries = {key: entry for part in shard for key, entry in part.entries.items()}
        write_safetensors(folder / name, entries, (one for part in shard for one in part.chunks()), metadata)
        homes |= dict.fromkeys(entries, name)
    if len(shards) > 1:
        size = sum(part.nbytes for shard in shards for part in shard)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
