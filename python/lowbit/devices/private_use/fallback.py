# SPDX-License-Identifier: Apache-2.0
"""The fallback for torch ops without a kernel of their own here: run the CPU kernel, in one launch, on the device's
memory.

Inputs become CPU tensors at the same address (nothing is copied), so in-place writes reach the device tensor. Results
become new device tensors, or a view of the device tensor whose memory they use. An `out=` tensor may be resized by the
op, so it is copied, and the result is copied back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowbit.devices.private_use import claimed, memory

_HOST_INDICES = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}
"""Ops that accept CPU tensors as indices together with device tensors, as on every device."""


@dataclass(frozen=True, slots=True)
class _Schema:
    """The parts of an op's schema that a call needs, such as the arguments that are `out=` tensors and the one that
    names a device."""

    outs: frozenset[str]
    tensors: frozenset[str]
    device: str | None
    takes_host: bool
    names: tuple[str, ...]


@lru_cache(maxsize=4096)
def _schema_of(op: Any) -> _Schema:
    arguments = op._schema.arguments
    return _Schema(
        outs=frozenset(a.name for a in arguments if a.is_out),
        tensors=frozenset(a.name for a in arguments if str(a.type) == "Tensor"),
        device=next((a.name for a in arguments if str(a.type) in ("Device", "Optional[Device]", "Device?")), None),
        takes_host=op._schema.name in _HOST_INDICES,
        names=tuple(a.name for a in arguments),
    )


@dataclass(slots=True)
class _Call:
    """The tensors of one call: the mapping between device tensors and host tensors."""

    op: Any
    schema: _Schema
    hosts: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # by id of the host tensor: (device tensor, host tensor)
    outs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def to_host(self, value: Any, is_out: bool = False) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != claimed.name:
                return value
            host = _resizable_copy(value) if is_out else memory.on_host(value)
            self.hosts[id(host)] = value, host
            if is_out:
                self.outs.append((value, host))
            return host
        if isinstance(value, list | tuple):
            return type(value)(self.to_host(item, is_out) for item in value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == claimed.name else value

    def to_device(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            return self._tensor_to_device(value, device)
        if isinstance(value, list | tuple):
            return type(value)(self.to_device(item, device) for item in value)
        return value

    def _tensor_to_device(self, host: Tensor, device: torch.device) -> Tensor:
        if id(host) in self.hosts:
            return self.hosts[id(host)][0]
        if host.device.type != "cpu" or host.layout != torch.strided:
            raise NotImplementedError(f"{self.op}: a {host.layout} result on {host.device} cannot be on {claimed.name}")
        viewed = self._viewed_by(host)
        if viewed is not None:
            if viewed.dtype != host.dtype:
                raise NotImplementedError(
                    f"{self.op}: a view of another dtype, {host.dtype} of {viewed.dtype}, needs a kernel on "
                    f"{claimed.name}"
                )
            return viewed.as_strided(
                host.shape, host.stride(), viewed.storage_offset() + _elements_between(viewed, host)
            )
        made = memory.empty_strided(host.shape, _strides_for(host), dtype=host.dtype, device=device)
        memory.on_host(made).copy_(host)
        return made

    def _viewed_by(self, host: Tensor) -> Tensor | None:
        storage = host.untyped_storage()._cdata
        return next((ours for ours, alias in self.hosts.values() if alias.untyped_storage()._cdata == storage), None)

    def take_outs(self) -> None:
        for ours, host in self.outs:
            if ours.shape != host.shape:
                ours.resize_(host.shape)
                if ours.stride() != host.stride():  # LAPACK's order, with gaps
                    ours.set_(memory.empty_strided(host.shape, host.stride(), dtype=ours.dtype, device=ours.device))
            memory.on_host(ours).copy_(host)


def fallback(op: Any, *args: Any, **options: Any) -> Any:
    """Run ``op`` by its CPU kernel. This is the kernel of all ops that have none for the device."""
    schema = _schema_of(op)
    tensors = _tensors_in((*args, *options.values()))
    ours = [tensor for tensor in tensors if tensor.device.type == claimed.name]
    _check_one_device(op, schema, tensors, ours)
    device = _result_device(schema, args, options, ours)
    call = _Call(op, schema)
    with memory.run(*[tensor.device for tensor in ours], device):
        host_args = [
            call.to_host(_as_tensor(value, name, schema), name in schema.outs)
            for name, value in zip(schema.names, args, strict=False)
        ]
        host_options = {name: call.to_host(value, name in schema.outs) for name, value in options.items()}
        result = op(*host_args, **host_options)
        call.take_outs()
        return call.to_device(result, device) if device.type == claimed.name else result


def _as_tensor(value: Any, name: str, schema: _Schema) -> Any:
    """Return a tensor for a number if the schema has a tensor there: the dispatcher passes such numbers unchanged."""
    if name not in schema.tensors or not isinstance(value, int | float | complex):
        return value
    return torch.tensor(value)


def _tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _check_one_device(op: Any, schema: _Schema, tensors: list[Tensor], ours: list[Tensor]) -> None:
    """Raise an error unless all tensors are on one device, as on torch's own devices. 0-d tensors and indices may be on
    the CPU."""
    first = ours[0].device if ours else None
    for tensor in tensors:
        foreign = (
            tensor.device != first and tensor.dim() > 0 and not (schema.takes_host and tensor.device.type == "cpu")
        )
        if first is not None and foreign:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{first} and {tensor.device}! (in {op})"
            )


def _result_device(schema: _Schema, args: tuple[Any, ...], options: dict[str, Any], ours: list[Tensor]) -> torch.device:
    asked = None
    if schema.device is not None:
        position = schema.names.index(schema.device)
        asked = args[position] if position < len(args) else options.get(schema.device)
    if asked is None:
        return ours[0].device if ours else torch.device(claimed.name, memory.index_of(None))
    return asked


def _resizable_copy(tensor: Tensor) -> Tensor:
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return host.copy_(memory.on_host(tensor)) if _is_dense(tensor) else memory.on_host(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor has neither overlapping elements nor gaps."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _strides_for(host: Tensor) -> Any:
    return host.stride() if _is_dense(host) else memory.dense_strides(host.shape)


def _elements_between(ours: Tensor, host: Tensor) -> int:
    return (host.data_ptr() - ours.data_ptr()) // host.itemsize
