# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors file as views of its mapped pages.

Pages that are only read are those of the system's cache, which all processes share and which the system drops when
memory is short. Writing to a tensor copies its page, and leaves the file as it is. Such a mapping reserves memory for
all of its pages, unless MAP_NORESERVE is given: without it, Linux refuses a file larger than the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lowbit.quant.safetensors_file import SafetensorsFile

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the number on x86 and ARM; Python 3.13 has the name
_mappings: dict[int, weakref.ref[mmap.mmap]] = {}
"""The mapped files, by the address of their first byte."""


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on its mapped pages. Those that do not lie at a multiple of the size of
    their elements are read into memory.

    Raises:
        ValueError: the file is not a safetensors file.
    """
    file = SafetensorsFile(path)
    places = {name: file.place(name) for name in file.entries}
    pages = _map(path)
    tensors = {}
    for name, (begin, dtype, entry) in places.items():
        if not entry.nbytes or begin % dtype.itemsize:
            tensors[name] = file.read(name)
        else:
            flat = torch.frombuffer(pages, dtype=torch.uint8, count=entry.nbytes, offset=begin)
            tensors[name] = flat.view(dtype).view(entry.shape)
    return tensors


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if sys.platform == "linux":
            access = mmap.PROT_READ | mmap.PROT_WRITE
            pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=access)
        else:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
    _mappings[begin] = weakref.ref(pages, lambda _: _mappings.pop(begin, None))
    return pages


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes of these tensors lie in mapped files."""
    spans = [(begin, begin + len(pages)) for begin, of in [*_mappings.items()] if (pages := of()) is not None]
    each = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"}
    return sum(size for at, size in each.items() if any(begin <= at < end for begin, end in spans))


def read_ahead(weights: Iterable[Tensor], index: Tensor) -> None:
    """Let the system begin to read the pages of the experts of these packed weights that an index names. It does not
    wait for them, and reads all at once, where a kernel that meets missing pages waits for one after another.

    Args:
        weights: packed weights ``[experts, ...]`` in mapped files.
        index: experts of tokens; other numbers are no experts.
    """
    advice = getattr(mmap, "MADV_WILLNEED", None)
    if advice is None:
        return
    madvise = ctypes.CDLL(None).madvise
    picked = index.unique().tolist()
    for weight in weights:
        size, first = weight[0].nbytes, weight.data_ptr()
        for expert in picked:
            if 0 <= expert < len(weight):
                begin = (first + expert * size) // mmap.PAGESIZE * mmap.PAGESIZE
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(first + (expert + 1) * size - begin), advice)
