# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: metadata and the position of each tensor, fully checked before any weight is read.

The ``gguf`` package's reader creates a numpy view of every word of a vocabulary, which takes seconds. Here the words
are decoded on demand, and the sizes claimed by a damaged file are first compared with the size of the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from lowbit.checkpoints.gguf.counts import check_counts
from lowbit.checkpoints.gguf.open_file import OpenFile

_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_FIRST, _MOST = 1 << 20, 1 << 29
"""The number of bytes in which the header is looked for: first, and at most."""
_TYPES_OF_IK = {  # which no other program reads; 200 and more are the same types with 4 or 8 rows side by side
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT",
    155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT", 202: "Q4_0_R8", 206: "Q5_0_R4", 208: "Q8_0_R8",
    210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4", 214: "Q6_K_R4", 216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4", 220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4",
    223: "IQ4_XS_R8", 229: "IQ1_M_R4", 230: "BF16_R16", 233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4",
    338: "IQ3_K_R4", 339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 353: "MXFP4_R8",
    397: "Q8_K_R16", 398: "Q8_KV_R8", 399: "Q8_K_R8",
}  # fmt: skip
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file. Its bytes are read on demand."""

    name: str
    type: str
    """The type's name in the ``gguf`` package: "F32", "Q4_0" ..."""
    shape: tuple[int, ...]
    """The shape as in torch: rows first."""
    file: OpenFile | None = None
    """The open file, or None for a tensor that is yet to be written."""
    begin: int = 0
    nbytes: int = 0

    @property
    def data(self) -> bytearray:
        """All bytes of the tensor."""
        return self.file.read(self.begin, self.nbytes)

    def rows(self, begin: int, end: int) -> bytearray:
        """Return the bytes of rows ``begin`` to ``end``; those of several matrices are counted through. Raises the
        errors of `OpenFile.read`."""
        size = self.nbytes // prod(self.shape[:-1])
        return self.file.read(self.begin + begin * size, (end - begin) * size)


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of strings in a header, such as the words of a tokenizer. It is decoded on demand."""

    data: memoryview
    count: int

    def __iter__(self) -> Iterator[str]:
        at, length_at = 0, struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            begin = at + 8
            at = begin + length_at(self.data, at)[0]
            yield str(self.data[begin:at], "utf-8", "replace")


@dataclass(slots=True)
class GgufFile:
    """A GGUF file, or all files of a split one."""

    paths: list[Path]
    metadata: dict[str, Any]
    """Values by key, except for string arrays."""
    texts: dict[str, Texts]
    """String arrays by key."""
    kinds: dict[str, GGUFValueType]
    """The type of each value in ``metadata``."""
    tensors: dict[str, GgufTensor]
    files: list[OpenFile] = field(repr=False)

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which must not be a string array.

        Raises:
            ValueError: it is a string array. The message names the file and the key.
        """
        if key in self.texts:
            raise ValueError(
                f"{self.paths[0]}: {key} must not be an array of strings, got one of {self.texts[key].count} strings"
            )
        return self.metadata.get(key, default)

    def array_of_texts(self, key: str) -> Texts | tuple[str, ...]:
        """Return the string array of a key; it is empty if the file does not have the key.

        Raises:
            ValueError: the value is something else. The message names the file and the key.
        """
        if key in self.metadata:
            raise ValueError(f"{self.paths[0]}: {key} must be an array of strings, got {self.metadata[key]!r:.80}")
        return self.texts.get(key, ())

    def check_unchanged(self) -> None:
        """Raise ValueError if a part was written to since it was opened."""
        for file in self.files:
            file.check_unchanged()

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the header of a file, and those of the other parts if it was split.

        Raises:
            FileNotFoundError: the file or one of its parts does not exist.
            ValueError: it is not a GGUF file of this byte order and version, it is truncated, it has a type of tensor
                that the ``gguf`` package does not know, or the numbers of layers, features or heads are not those of
                its tensors. The message names the file, and the tensor or the key.
        """
        path = Path(path)
        whole = _read(path)
        count = whole.value("split.count", 1)
        if type(count) is not int:
            raise ValueError(f"{path}: split.count must be a number, got {count!r:.80}")
        for other in _other_parts(path, count):
            part = _read(other)
            whole.paths.append(other)
            whole.files += part.files
            for name, tensor in part.tensors.items():
                if name in whole.tensors:
                    raise ValueError(f"{other}: tensor {name} must be in one part, got it in two")
                whole.tensors[name] = tensor
        wanted = whole.value("split.tensors.count", len(whole.tensors))
        if wanted != len(whole.tensors):
            raise ValueError(f"{path}: all parts must hold {wanted} tensors together, got {len(whole.tensors)}")
        whole.value(f"{whole.architecture}.block_count")
        # String arrays count as lists with a value per layer, which are checked when they are read.
        others = dict.fromkeys(whole.texts, [])
        shapes = {tensor.name: tensor.shape for tensor in whole.tensors.values()}
        check_counts(path, whole.architecture, others | whole.metadata, shapes)
        return whole


class _Longer(Exception):
    """The header is longer than the bytes that were read."""


class _Header:
    """A cursor over the bytes of a header. It raises an error that names the file if the file ends too early."""

    def __init__(self, file: OpenFile, data: memoryview) -> None:
        self.path, self.size, self.data, self.at = file.path, file.size, data, 0

    def take(self, count: int) -> memoryview:
        if count > self.size - self.at:
            raise ValueError(
                f"{self.path}: the header must go on for {count} bytes from byte {self.at} on, got a file of "
                f"{self.size} bytes: it is cut or damaged"
            )
        if count > len(self.data) - self.at:
            raise _Longer
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(kind)))

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", "replace")

    def texts(self, count: int) -> Texts:
        """Skip an array of strings. `text` would be slow for the 100,000 words of a tokenizer."""
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(data):
                at += 8
                break
            at += 8 + length_at(data, at)[0]
        return Texts(self.take(at - self.at), count)

    def value(self, kind: GGUFValueType) -> Any:
        """Return a value of this kind; `Texts` for a string array."""
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.kind(), self.number("Q")
        if kind in _NUMBERS:
            return list(self.numbers(_NUMBERS[kind], count))
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{self.path}: metadata must hold no arrays of arrays, got one at byte {self.at}")
        return self.texts(count)

    def kind(self) -> GGUFValueType:
        number = self.number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ValueError(
                f"{self.path}: a value must be of type 0..12, got {number} at byte {self.at - 4}"
            ) from None


def _read(path: Path) -> GgufFile:
    file, length = OpenFile(path), _FIRST
    if file.size < 24:
        raise ValueError(f"{path}: a GGUF file must have at least 24 bytes, got {file.size}")
    while True:
        header = _Header(file, memoryview(file.read(0, min(length, file.size))))
        try:
            return _parsed(file, header)
        except _Longer:
            if length >= _MOST:
                raise ValueError(f"{path}: the header must end within {_MOST} bytes: it is damaged") from None
            length *= 8


def _parsed(file: OpenFile, header: _Header) -> GgufFile:
    path = file.path
    magic, version = bytes(header.take(4)), header.number("I")
    if magic != b"GGUF":
        raise ValueError(f"{path}: a GGUF file must begin with b'GGUF', got {magic!r}")
    if version not in (2, 3):
        order = ", of a file in the other byte order" if version & 0xFFFF == 0 else ""
        raise ValueError(f"{path}: the version must be 2 or 3, got {version}{order}")
    tensor_count, value_count = header.numbers("Q", 2)
    metadata, texts, kinds = {}, {}, {}
    for _ in range(value_count):
        key, kind = header.text(), header.kind()
        value = header.value(kind)
        if isinstance(value, Texts):
            texts[key] = value
        else:
            metadata[key], kinds[key] = value, kind
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError(f"{path}: general.architecture must be in the metadata, got none")
    infos = [(header.text(), _shape(header), header.number("I"), header.number("Q")) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment must be a power of two, got {alignment!r:.80}")
    begin = place = -(-header.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in infos:
        tensor = tensors[name] = _tensor(file, begin + offset, name, shape, number)
        if tensor.begin != place:  # an error in llama.cpp too
            raise ValueError(
                f"{path}: tensor {name} must begin behind the one before, at byte {place}, got {tensor.begin}"
            )
        place += -(-tensor.nbytes // alignment) * alignment
    if len(tensors) < tensor_count:
        raise ValueError(f"{path}: tensors must have names of their own, got {tensor_count} with {len(tensors)} names")
    return GgufFile([path], metadata, texts, kinds, tensors, [file])


def _shape(header: _Header) -> tuple[int, ...]:
    dims = header.number("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"{header.path}: a tensor must have 1 to 4 dimensions, got {dims} at byte {header.at - 4}")
    return header.numbers("Q", dims)[::-1]


def _tensor(file: OpenFile, begin: int, name: str, shape: tuple[int, ...], number: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        known = f"0..{max(GGMLQuantizationType)}"
        got = f"{number} ({_TYPES_OF_IK[number]} of ik_llama.cpp)" if number in _TYPES_OF_IK else str(number)
        raise ValueError(f"{file.path}: the type of tensor {name} must be one of {known}, got {got}") from None
    elements, size = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise ValueError(
            f"{file.path}: rows of tensor {name} must be whole blocks of {elements} for {kind.name}, got {shape}"
        )
    nbytes = prod(shape) // elements * size
    if begin + nbytes > file.size:
        raise ValueError(
            f"{file.path}: tensor {name} must end at byte {begin + nbytes}, got a file of {file.size} bytes: it is cut"
        )
    return GgufTensor(name, kind.name, shape, file, begin, nbytes)


def _other_parts(path: Path, count: int) -> Iterator[Path]:
    """Return the paths of the other parts of a file split into ``count``."""
    if count <= 1:
        return
    named = _SPLIT.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ValueError(
            f"{path}: a file that is one of {count} parts must be named like NAME-00001-of-{count:05}.gguf"
        )
    for number in range(1, count + 1):
        other = path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")
        if other == path:
            continue
        if not other.exists():
            raise FileNotFoundError(
                f"{path}: {other.name}, another of its {count} parts, must lie beside it, and is missing"
            )
        yield other
