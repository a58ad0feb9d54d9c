# SPDX-License-Identifier: Apache-2.0
"""The end of a process whose tensors are on a device of ours.

torch computes gradients in a thread per device. backward() returns when the last gradient is there, but the device's
thread then takes the interpreter's lock once more, to free tensors. A process that ends in between is terminated, exit
code -6 (torch 2.13, CPython 3.11), which a short program on a busy machine met in CI.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_PAUSE = 0.012  # seconds; a thread that waits for the interpreter's lock wakes every 5 ms, which counts as a switch


def wait_at_exit() -> None:
    """Let the process end only once torch's threads of devices have nothing left to do, or after 10 seconds."""
    atexit.register(wait, 10.0)


def wait(timeout: float) -> bool:
    """Wait until every thread of torch's autograd sleeps; returns whether that came within `timeout` seconds."""
    end = time.monotonic() + timeout
    before = _states()
    while before:
        time.sleep(_PAUSE)  # without the interpreter's lock
        after = _states()
        if after == before and all(state == "S" for state, _ in after.values()):
            break
        if time.monotonic() > end:
            return False
        before = after
    return True


def _states() -> dict[str, tuple[str, str]]:
    """The state and the number of switches to other threads, by the id of a thread of autograd."""
    found = {}
    for task in _TASKS.glob("*"):
        try:
            if (task / "comm").read_text().startswith("pt_autograd_"):
                fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip()
        except OSError:
            continue  # the thread has ended
    return found
