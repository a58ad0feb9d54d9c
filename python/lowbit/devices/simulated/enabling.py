# SPDX-License-Identifier: Apache-2.0
"""enable: the one switch of the simulated devices."""

from __future__ import annotations

import threading

from lowbit import _C
from lowbit.devices import places
from lowbit.devices.simulated.name import DEVICE

_lock = threading.Lock()


def enable(devices: int = 2, memory: int = 1 << 34) -> None:
    """Make the devices ``lowbit_sim:0`` ... known to torch; calling again with the same numbers does nothing.

    Must come before the first ``backward()`` of the process. Cannot be undone. The first time for a version of torch it
    builds 150 lines of C++ (some seconds). ``LOWBIT_SIM=1`` in the environment calls it when lowbit is imported.

    Args:
        devices: the number of devices, 1 to 8.
        memory: bytes of each, at least 1 MiB. Address space only: pages that are used take memory.

    Raises:
        RuntimeError: another package has taken torch's one place for such a device, a backward() has run, there is no
            C++ compiler, or the devices run already with other numbers.
        ValueError: a number is out of range.
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
    from lowbit.devices.private_use import registration  # imports torch's internals, for this function alone
    from lowbit.devices.simulated.device_module import SimulatedModule

    registration.register(
        DEVICE, SimulatedModule(), lambda: _C.simulated.start(devices, memory), asked_by="simulated.enable"
    )
    places.serve(DEVICE)


def enabled() -> bool:
    """Return True once the devices run."""
    return _C.simulated.device_count() > 0
