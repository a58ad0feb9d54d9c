# SPDX-License-Identifier: Apache-2.0
"""Release the memory of a tensor in a mapped file.

transformers maps a checkpoint, so each page that was read stays in memory until the last tensor of the file is gone.
Without this, packing a model while it is read would peak at its float size instead of its packed size.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from torch import Tensor

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def release_pages(tensor: Tensor, files: list[str]) -> None:
    """Release the whole pages under ``tensor`` if it is a view of one of ``files``. They are read again on access.

    This requires a private mapping of one of these files: pages without a file behind them would lose their values.
    """
    if sys.platform != "linux" or _DONTNEED is None or not tensor.is_contiguous():
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and _lies_in(begin, end, {os.path.realpath(file) for file in files}):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def _lies_in(begin: int, end: int, files: set[str]) -> bool:
    """Whether one private mapping of one of the files covers the range. /proc/self/maps has a line for each mapping."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, access, _, _, _, *path = line.split(maxsplit=5)
            first, last = (int(text, 16) for text in addresses.split("-"))
            if first <= begin and end <= last:
                return access.endswith("p") and bool(path) and path[0].rstrip("\n") in files
    return False
