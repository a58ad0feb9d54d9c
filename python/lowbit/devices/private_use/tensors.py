# SPDX-License-Identifier: Apache-2.0
"""The ops that a device must implement itself: views, storage, size, copies, and the value of one element.

Views read no memory, so torch's CPU kernels for them work on any device. They are called directly on lowbit's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.devices.private_use import memory

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten

_VIEWS = (
    aten.as_strided.default,
    aten.view.default,
    aten.view.dtype,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
)


def _by_cpu_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        return op.redispatch(_CPU, *args, **options)

    return kernel


def _set_tensor(self: Tensor, source: Tensor) -> Tensor:
    return self.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


def _set_nothing(self: Tensor) -> Tensor:
    return _set_tensor(self, memory.empty([0], dtype=self.dtype, device=self.device))


def _resize(self: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize the tensor in its storage if that is large enough, else in a new storage with the old bytes. Other views
    keep the old storage."""
    if list(size) == list(self.shape) and memory_format is None:
        return self
    strides = memory.dense_strides(size, memory_format)
    storage, offset = self.untyped_storage(), self.storage_offset()
    if storage.nbytes() < (offset + math.prod(size)) * self.itemsize:
        larger = memory.empty([(offset + math.prod(size)) * self.itemsize], dtype=torch.uint8, device=self.device)
        old = memory.empty([0], dtype=torch.uint8, device=self.device).set_(storage, 0, [storage.nbytes()], [1])
        larger[: storage.nbytes()].copy_(old)
        storage = larger.untyped_storage()
    return self.set_(storage, offset, size, strides)


def _copy_from(self: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    with memory.run(self.device, to.device):
        host, target = (memory.on_host(t) if t.device.type != "cpu" else t for t in (self, to))
        target.copy_(host)
    return to


def _copy_from_and_resize(self: Tensor, to: Tensor) -> Tensor:
    return _copy_from(self, to.resize_(self.shape))


def _item(self: Tensor) -> Any:
    with memory.run(self.device):
        return memory.on_host(self).item()


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.empty.memory_format: memory.empty,
    aten.empty_strided.default: memory.empty_strided,
    **{op: _by_cpu_kernel(op) for op in _VIEWS},
    aten.set_.source_Tensor: _set_tensor,
    aten.set_.default: _set_nothing,
    aten.resize_.default: _resize,
    aten._copy_from.default: _copy_from,
    aten._copy_from_and_resize.default: _copy_from_and_resize,
    aten._local_scalar_dense.default: _item,
}
