# SPDX-License-Identifier: Apache-2.0
"""safetensors files, read and written with one tensor in memory at a time.

A file consists of the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets; and ``__metadata__``), and the bytes of all tensors without gaps. The safetensors package maps the files
that it reads, so their pages stay in the process, and needs all tensors in memory to write a file.
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
    "F8_E8M0": torch.float8_e8m0fnu,
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 22
_ALIGNMENT = 64  # alignment of the first tensor, so that a mapped packed weight begins on a cache line
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: safetensors' name of its dtype, its shape, and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Return the entry of a tensor, which may be on the meta device."""
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


class SafetensorsFile:
    """A safetensors file that is open for reading; ``entries`` are its tensors in the order of their bytes.

    Raises:
        ValueError: the file is not a safetensors file, or its header does not fit its size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError(f"the header must have 2 to {size - 8} bytes, got {length}")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not all(isinstance(text, str) for text in self.metadata.values()):
                raise ValueError("metadata must be strings")
            self._begin = 8 + length
            self._offsets: dict[str, int] = {}
            self.entries: dict[str, Entry] = {}
            end = 0
            for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                dtype, shape, (first, last) = told["dtype"], told["shape"], told["data_offsets"]
                if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
                    raise ValueError(f"{name} must have a dtype and a shape, got {dtype!r} and {shape!r}")
                if not (_is_size(first) and _is_size(last)) or first != end or last < first:
                    raise ValueError(
                        f"{name} must begin at byte {end}, where the tensor before it ends, got bytes {first} to {last}"
                    )
                self._offsets[name], end = first, last
                self.entries[name] = Entry(dtype, tuple(shape), last - first)
            if end != size - self._begin:
                raise ValueError(f"tensors must fill the {size - self._begin} bytes after the header, got {end} bytes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} must be a safetensors file: {error}") from None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor in chunks of 4 MiB."""
        left = self.entries[name].nbytes
        with self.path.open("rb") as file:
            file.seek(self._begin + self._offsets[name])
            while left:
                read = file.read(min(left, _CHUNK))
                if not read:
                    raise ValueError(f"{self.path} ends inside of {name}")
                left -= len(read)
                yield read

    def place(self, name: str) -> tuple[int, torch.dtype, Entry]:
        """Return the position of a tensor's first byte in the file, its dtype and its entry.

        Raises:
            ValueError: its dtype is not in ``DTYPES``, or its size does not fit its shape.
        """
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
            raise ValueError(
                f"{self.path}: {name} must have the bytes of {entry.dtype} {list(entry.shape)}, got {entry.nbytes} "
                "bytes"
            )
        return self._begin + self._offsets[name], dtype, entry

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            ValueError: its dtype is not in ``DTYPES``, or its size does not fit its shape.
        """
        begin, dtype, entry = self.place(name)
        tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
        memory = bytes_of(tensor)
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < entry.nbytes:
                count = file.readinto(memory[done:])
                if not count:
                    raise ValueError(f"{self.path} ends inside of {name}")
                done += count
        return tensor


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read from disk instead of the page cache where possible."""
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
    """Write a safetensors file and return its CRC-32. The file is on disk (fsync) when this function returns.

    Args:
        path: the file to write.
        entries: the tensors by name.
        tensors: the bytes of each tensor, in chunks, in the order of ``entries``.
        metadata: the ``__metadata__`` of the file.

    Raises:
        ValueError: the size of a tensor differs from its entry.
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
    """Return the memory of a contiguous CPU tensor, without a copy and without numpy. The tensor must outlive it."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"bytes_of: tensor must be contiguous on the cpu, got {tensor.device} {tensor.stride()}")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() or 1)).cast("B")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index, ``*.index.json``, lists.

    Raises:
        ValueError: the index has no ``weight_map`` from names to files.
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
    """Return the files of a checkpoint.

    Args:
        place: a file, or a folder with ``model.safetensors`` or an index with its shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the index is invalid, see `shards_of`.
    """
    if place.is_file():
        return [place]
    if (place / INDEX).exists():
        files = [place / part for part in shards_of(place / INDEX)]
    else:
        files = [place / SINGLE]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{place} must hold {INDEX} with its shards or {SINGLE}; there is no {missing[0]}")
    return files
