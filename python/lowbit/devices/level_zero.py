# SPDX-License-Identifier: Apache-2.0
"""`lowbit_ze`: Intel GPUs through oneAPI Level Zero, for a torch that was not built for them. docs/ops/level_zero.md
lists the ops that run on them.

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
    """The module `torch.lowbit_ze`. GPUs have the names that their driver gives them."""

    def name_of(self, index: int) -> str:
        names: list[str] = _C.level_zero.facts()["names"]
        return names[index]


def enable() -> None:
    """Add the Intel GPUs to torch as ``lowbit_ze:0`` and so on; further calls do nothing.

    It must be called before the first ``backward()`` of the process, and cannot be undone. The first call with a
    version of torch builds 150 lines of C++, which takes some seconds. A torch that was built for Intel GPUs has them
    as ``xpu`` and does not need this.

    Raises:
        RuntimeError: there is no loader, driver or GPU (the message says which), another device uses torch's only slot
            for external devices, a backward() has run, or there is no C++ compiler.
    """
    from lowbit.devices.private_use import registration  # here, because it imports torch internals

    with _lock:
        if not enabled():
            registration.register(DEVICE, LevelZeroModule(), _C.level_zero.start, asked_by="level_zero.enable")
            places.serve(DEVICE, every_op=False)


def enabled() -> bool:
    """Whether lowbit has added the GPUs to torch."""
    return claimed.name == DEVICE
