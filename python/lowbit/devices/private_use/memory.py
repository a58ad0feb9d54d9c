# SPDX-License-Identifier: Apache-2.0
"""Device memory as tensors. Each is a block allocated by the C++ core, passed to torch as a DLPack capsule of device
type 12."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.devices.private_use import claimed

_from_dlpack = torch._C._from_dlpack
_KINDS = {  # DLPack's type code
    0: (torch.int8, torch.int16, torch.int32, torch.int64),
    1: (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    2: (torch.float16, torch.float32, torch.float64),
    4: (torch.bfloat16,),
    5: (torch.complex32, torch.complex64, torch.complex128),
    6: (torch.bool,),
}
CODES = {dtype: (code, 8 * dtype.itemsize) for code, dtypes in _KINDS.items() for dtype in dtypes}
"""DLPack's code and bits of a dtype. torch has other dtypes (float8), whose tensors are created as bytes first."""


def index_of(device: torch.device | None) -> int:
    """Return the index of a device, or of the current device if it has none."""
    return torch.accelerator.current_device_index() if device is None or device.index is None else device.index


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    if pin_memory:
        raise RuntimeError(f"Only dense CPU tensors can be pinned, got pin_memory=True on {claimed.name}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    index = index_of(device)
    known = CODES.get(dtype)
    try:
        if known is not None:
            return _from_dlpack(_C.private_use.empty(index, size, stride, *known))
        extent = 0 if 0 in size else dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)))
        raw = _from_dlpack(_C.private_use.empty(index, [extent], [1], *CODES[torch.uint8]))
    except MemoryError as error:
        raise torch.OutOfMemoryError(str(error)) from None
    return raw.view(dtype).as_strided(size, stride)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    if any(n < 0 for n in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    return empty_strided(size, dense_strides(size, memory_format), dtype=dtype, device=device, pin_memory=pin_memory)


def dense_strides(size: Sequence[int], memory_format: torch.memory_format | None = None) -> list[int]:
    """Return the strides of a dense tensor. For channels_last, dimension 1 is the innermost."""
    order = list(range(len(size)))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        order = [0, *order[2:], 1]
    strides, extent = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = extent
        extent *= max(size[dim], 1)
    return strides


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor on the same memory, with the same storage, strides and lazy conj and neg bits. Use it only
    inside ``run()``."""
    dtype, storage = tensor.dtype, tensor.untyped_storage()
    code, bits = CODES.get(dtype, CODES[torch.uint8])
    whole = _from_dlpack(_C.private_use.host_view(storage.data_ptr(), [storage.nbytes() * 8 // bits], [1], code, bits))
    host = (whole if dtype in CODES else whole.view(dtype)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    if tensor.is_conj():
        host = host.conj()
    return torch._neg_view(host) if tensor.is_neg() else host


@contextmanager
def run(*devices: torch.device) -> Any:
    """Open the memory of those of ``devices`` that are lowbit's, as one launch on the current stream. Device memory may
    be accessed only inside."""
    indices = sorted({index_of(device) for device in devices if device.type == claimed.name})
    opened = [_C.private_use.Run(index, torch.accelerator.current_stream(index).stream_id) for index in indices]
    try:
        yield
    finally:
        opened.clear()
