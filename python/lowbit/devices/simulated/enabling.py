# SPDX-License-Identifier: Apache-2.0
"""enable: add the simulated devices to torch."""

from __future__ import annotations

import threading

from lowbit import _C
from lowbit.devices import places
from lowbit.devices.simulated.name import DEVICE

_lock = threading.Lock()


def enable(devices: int = 2, memory: int = 1 << 34) -> None:
    """Add the devices ``lowbit_sim:0`` and so on to torch; further calls with the same arguments do nothing.

    It must be called before the first ``backward()`` of the process, and cannot be undone. The first call with a
    version of torch builds 150 lines of C++, which takes some seconds. With ``LOWBIT_SIM=1`` in the environment,
    `import lowbit` calls it.

    Args:
        devices: the number of devices, 1 to 8.
        memory: the bytes of each device, at least 1 MiB. They are address space: only used pages take memory.

    Raises:
        RuntimeError: another package uses torch's only slot for external devices, a backward() has run, there is no C++
            compiler, or the devices were enabled with other arguments.
        ValueError: an argument is out of range.
    """
    with _lock:
        running = _C.simulated.device_count()
        if running == 0:
            _start(devices, memory)
            return
        capacity = _C.private_use.usage(0)["capacity"]
        if devices != running or abs(capacity - memory) > 4096:
            raise RuntimeError(
                f"simulated.enable: {running} devices of {capacity} bytes run already, "
                f"got devices={devices}, memory={memory}"
            )


def _start(devices: int, memory: int) -> None:
    from lowbit.devices.private_use import registration  # here, because it imports torch internals
    from lowbit.devices.simulated.device_module import SimulatedModule

    registration.register(
        DEVICE, SimulatedModule(), lambda: _C.simulated.start(devices, memory), asked_by="simulated.enable"
    )
    places.serve(DEVICE)


def enabled() -> bool:
    """Whether the devices are enabled."""
    return _C.simulated.device_count() > 0
