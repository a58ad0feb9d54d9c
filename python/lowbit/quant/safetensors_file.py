# SPDX-License-Identifier: Apache-2.0
"""safetensors files tensor by tensor: read without a mapping, written without holding them.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets, and
``__metadata__``), and the bytes of all tensors without gaps. The safetensors package maps a file that it reads, whose
pages stay in the process, and takes all tensors of a file to write it; here one tensor at a time is in memory.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CHUNK = 1 << 22
_ALIGNMENT = 64  # alignment of the first tensor: a mapped packed weight begins on a cache line
INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: the name of its dtype in the format, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsFile:
    """Read one file; ``entries`` are its tensors in the order of their bytes.

    Raises:
        ValueError: it is none, or its header does not fit its size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not all(isinstance(text, str) for text in self.metadata.values()):
                raise ValueError("metadata that are no texts")
            self._begin = 8 + length
            self._offsets: dict[str, int] = {}
            self.entries: dict[str, Entry] = {}
            end = 0
            for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                dtype, shape, (first, last) = told["dtype"], told["shape"], told["data_offsets"]
                if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
                    raise ValueError(f"{name} has the dtype {dtype!r} and the shape {shape!r}")
                if not (_is_size(first) and _is_size(last)) or first != end or last < first:
                    raise ValueError(f"{name} lies at {first} to {last}")
                self._offsets[name], end = first, last
                self.entries[name] = Entry(dtype, tuple(shape), last - first)
            if end != size - self._begin:
                raise ValueError(f"tensors of {end} bytes in {size - self._begin}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, 4 MiB at a time."""
        left = self.entries[name].nbytes
        with self.path.open("rb") as file:
            file.seek(self._begin + self._offsets[name])
            while left:
                read = file.read(min(left, _CHUNK))
                if not read:
                    raise ValueError(f"{self.path} ends inside of {name}")
                left -= len(read)
                yield read

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own.

        Raises:
            ValueError: its dtype is none of ``DTYPES``, or its bytes are not those of its shape.
        """
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
            raise ValueError(f"{self.path}: {name} of {entry.dtype} {list(entry.shape)} in {entry.nbytes} bytes")
        tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
        memory = bytes_of(tensor)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._begin + self._offsets[name])
            done = 0
            while done < entry.nbytes:
                count = file.readinto(memory[done:])
                if not count:
                    raise ValueError(f"{self.path} ends inside of {name}")
                done += count
        return tensor


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file as it is on disk."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def write_safetensors(
    path: Path, entries: Mapping[str, Entry], tensors: Iterable[Iterable[bytes]], metadata: Mapping[str, str]
) -> int:
    """Write the tensors of ``entries``, whose bytes ``tensors`` gives in that order, and return the CRC-32 of the file.

    The bytes are on the disk when this returns.

    Raises:
        ValueError: a tensor has another number of bytes than its entry.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (end, end + entry.nbytes)}
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        crc = 0
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            crc = zlib.crc32(chunk, crc)
        for (name, entry), chunks in zip(entries.items(), tensors, strict=True):
            written = 0
            for chunk in chunks:
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
                written += len(chunk)
            if written != entry.nbytes:
                raise ValueError(f"{path}: {name} must have {entry.nbytes} bytes, got {written}")
        file.flush()
        os.fsync(file.fileno())
    return crc


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which has to live as long; without a copy, and without numpy."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"bytes_of: tensor must be contiguous on the cpu, got {tensor.device} {tensor.stride()}")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() or 1)).cast("B")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index, ``*.index.json``, tells of.

    Raises:
        ValueError: it has no ``weight_map`` from names to files.
    """
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
        if all(isinstance(file, str) for file in files):
            return sorted(files)
        problem = f"files {files}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = repr(error)
    raise ValueError(f"{index} must have a weight_map from names of tensors to files, got {problem}")


def safetensors_files(place: Path) -> list[Path]:
    """Return the files of a checkpoint: of a folder with ``model.safetensors`` or shards, or the one file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: as `shards_of`.
    """
    if place.is_file():
        return [place]
    if (place / INDEX).exists():
        files = [place / part for part in shards_of(place / INDEX)]
    else:
        files = [place / _SINGLE]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{place} must hold {INDEX} with its shards or {_SINGLE}; there is no {missing[0]}")
    return files
