# SPDX-License-Identifier: Apache-2.0
"""Run by test_rows.py in a process of its own: every tensor of a call ends where memory does."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap

import torch

from lowbit.testing import LinearCase, assert_within, make_data, run_linear

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy whose last byte is the last one before a page that may not be touched. Never freed."""
    if tensor is None:
        return None
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = libc.mmap(None, (pages + 1) * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    end = begin + pages * mmap.PAGESIZE
    assert libc.mprotect(end, mmap.PAGESIZE, 0) == 0
    memory = (ctypes.c_char * tensor.nbytes).from_address(end - tensor.nbytes)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


if __name__ == "__main__":
    count = 0
    for m, n, k in itertools.product((1, 3, 40), (1, 17, 63), (3, 64, 320)):
        case = LinearCase(m, n, k, "float32", "float32", bias="dtype of x", activation="silu", mul=True, add=True)
        data = make_data(case)
        fields = {name: guarded(getattr(data, name)) for name in ("x", "packed", "bias", "mul", "add")}
        y = run_linear(case, dataclasses.replace(data, **fields), "linear_float32_onednn")
        assert_within(y, data.wanted, data.allowed, str(case))
        count += 1
    print(count)
