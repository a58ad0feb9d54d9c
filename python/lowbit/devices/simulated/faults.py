# SPDX-License-Identifier: Apache-2.0
"""Functions that only simulated devices have: faults on demand, and exact counts."""

from __future__ import annotations

import torch

from lowbit import _C
from lowbit.devices.simulated.name import DEVICE


def inject(
    fault: str, device: int | str | torch.device = 0, *, after: int = 0, times: int = 1, microseconds: int = 0
) -> None:
    """Make a device fail: the next ``after`` allocations or launches succeed, and the ``times`` after them fail.

    Args:
        fault: ``"memory"``: an allocation raises torch.OutOfMemoryError. ``"launch"``: a kernel or a copy raises
            RuntimeError and has no effect. ``"lost"``: the same, and so does everything on the device until
            :func:`recover`. ``"slow"``: a launch takes longer.
        device: the number or name of the device.
        after: the number of allocations or launches that still succeed.
        times: the number of failures.
        microseconds: the extra time of a slow launch.

    Raises:
        ValueError: the fault is unknown, the device is not a simulated one, or a number is negative.
    """
    _C.simulated.inject(_index(device), fault, after, times, microseconds)


def recover(device: int | str | torch.device = 0) -> None:
    """Remove all faults of a device. A lost device returns with its memory unchanged."""
    _C.simulated.recover(_index(device))


def live_bytes(device: int | str | torch.device = 0) -> int:
    """Return the bytes of device memory in use, in blocks of 256."""
    return _usage(device)["live_bytes"]


def usage(device: int | str | torch.device = 0) -> dict[str, int]:
    """Return ``live_bytes``, ``peak_bytes``, ``live_blocks``, ``blocks`` (allocated so far) and ``capacity``."""
    return dict(_usage(device))


def launches(device: int | str | torch.device = 0, stream: torch.Stream | None = None) -> int:
    """Return how many kernels and copies have been launched on a device, on one of its streams or on all."""
    return _C.simulated.launches(_index(device), None if stream is None else stream.stream_id)


def _usage(device: int | str | torch.device) -> dict[str, int]:
    if _C.simulated.device_count() == 0:
        raise RuntimeError("simulated: enable() has not been called")
    return _C.private_use.usage(_index(device))


def _index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != DEVICE:
        raise ValueError(f"simulated: device must be one of {DEVICE}, got {device}")
    return device.index or 0
