# SPDX-License-Identifier: Apache-2.0
"""`lowbit_ze`: Intel GPUs by oneAPI Level Zero, for a torch that is not built for them. docs/ops/level_zero.md lists
the ops that run on them.

Example:
    >>> from lowbit.devices import level_zero
    >>> level_zero.enable()
    >>> model.to("lowbit_ze")
"""

from __future__ import annotations

import threading

from lowbit import _C
from lowbit.devices import places
from lowbit.devices.private_use import claimed
from lowbit.devices.private_use.device_module import DeviceModule

DEVICE = "lowbit_ze"
_lock = threading.Lock()


class LevelZeroModule(DeviceModule):
    """`torch.lowbit_ze`: GPUs by the names that their driver gives them."""

    def name_of(self, index: int) -> str:
        names: list[str] = _C.level_zero.facts()["names"]
        return names[index]


def enable() -> None:
    """Make the Intel GPUs known to torch as ``lowbit_ze:0`` ...; calling again does nothing.

    Must come before the first ``backward()`` of the process. Cannot be undone. The first time for a version of torch
    it builds 150 lines of C++ (some seconds). A torch that is built for Intel GPUs has them as ``xpu`` and needs
    none of this.

    Raises:
        RuntimeError: there is no loader, no driver or no GPU (says which), another device has taken torch's one place
            for one that is not its own, a backward() has run, or there is no C++ compiler.
    """
    from lowbit.devices.private_use import registration  # imports torch's internals, for this function alone

    with _lock:
        if not enabled():
            registration.register(DEVICE, LevelZeroModule(), _C.level_zero.start, asked_by="level_zero.enable")
            places.serve(DEVICE, every_op=False)


def enabled() -> bool:
    """Return True once torch knows the GPUs by us."""
    return claimed.name == DEVICE
