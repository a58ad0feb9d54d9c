# SPDX-License-Identifier: Apache-2.0
"""The devices that lowbit has kernels for, and the check of a tensor's device."""

from __future__ import annotations

import torch

from lowbit import _C

_served: tuple[str, ...] = ("cpu",)  # devices that all ops support
_listed: tuple[str, ...] = ("cpu",)  # devices that at least one op supports
_asked: dict[tuple[str, str], bool] = {}  # (type of device, op): whether the op has a kernel row there


def serve(device_type: str, *, every_op: bool = True) -> None:
    """Record that lowbit's ops, or some of them, now have kernels for a type of device."""
    global _served, _listed
    if device_type not in _listed:
        _listed = (*_listed, device_type)
        _served = (*_served, device_type) if every_op else _served


def has_kernels(device: torch.device) -> bool:
    """Whether lowbit's ops run on tensors of ``device``."""
    return device.type in _served


def types() -> tuple[str, ...]:
    """Return the types of device that lowbit's ops run on in this process, by torch's names."""
    return _listed


def type_of_rows(device: torch.device, kernel: str) -> str:
    """Return the type of device whose rows of ``kernel`` handle a tensor of ``device``: its own, or the CPU's, to which
    the tensor is then moved."""
    return device.type if device.type != "meta" and has_rows(kernel, device) else "cpu"


def packing(device: torch.device) -> torch.device:
    """Return the device on which a weight on ``device`` is quantized: the same one, or the CPU if ``quantize`` has no
    row there. The result and its layout are the same, bit for bit."""
    return device if device.type == "meta" or has_rows("quantize", device) else torch.device("cpu")


def has_rows(kernel: str, device: torch.device) -> bool:
    """Whether the op ``kernel`` of `_C.OPS` has rows for ``device``, which may be true for some ops only.

    Raises:
        RuntimeError: it has rows, but this machine cannot run them; the message says why.
    """
    if device.type in _served:
        return True
    asked = device.type, kernel
    if asked not in _asked:
        rows = [row for row in _C.kernels(kernel) if row["device"] == device.type]
        if rows and not any(row["available"] for row in rows):
            raise RuntimeError(f"{kernel}: the kernels for {device.type} cannot run here: {rows[0]['reason']}")
        if rows:
            _C.look_at_devices()
        _asked[asked] = bool(rows)
    return _asked[asked]


def refuses_layers(device: torch.device) -> str:
    """Return why quantized layers cannot be on ``device``, or an empty string. On a GPU, ``linear`` is sufficient;
    other ops may be missing."""
    try:
        return "" if has_rows("linear", device) else f"linear: no kernels for {device.type}"
    except RuntimeError as error:
        return str(error)


def check(
    op: str,
    name: str,
    device: torch.device,
    *,
    kernel: str | None = None,
    meta: bool = False,
    error: type[Exception] = ValueError,
) -> None:
    """Raise ``error`` unless lowbit has kernels for ``device``, for all ops or for ``kernel``. ``meta`` allows the meta
    device too.

    Example:
        >>> check("flex_attention", "query", query.device)
        ValueError: flex_attention: query must be on the CPU, got cuda:0
    """
    if device.type in _served or (meta and device.type == "meta") or (kernel and has_rows(kernel, device)):
        return
    raise error(f"{op}: {name} must be on {wanted()}, got {device}")


def wanted() -> str:
    """Return the supported devices for an error message: ``"the CPU"``, ``"the CPU or lowbit_sim"``."""
    return " or ".join(("the CPU", *_served[1:]))


def list() -> list[str]:
    """Return the devices that lowbit's ops run on in this process, by torch's names."""
    names = ["cpu"]
    for device_type in _listed[1:]:
        names += [f"{device_type}:{index}" for index in range(torch.get_device_module(device_type).device_count())]
    return names
