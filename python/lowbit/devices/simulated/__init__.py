# SPDX-License-Identifier: Apache-2.0
"""`lowbit_sim`: simulated devices, to run programs for several devices on a machine without them, and to develop
backends.

Each device has its own memory, which host code cannot access. torch's ops run their CPU kernels, lowbit's ops its own.
See docs/simulated.md.

Example:
    >>> from lowbit.devices import simulated
    >>> simulated.enable()
    >>> torch.ones(3, device="lowbit_sim:1") + 1
    tensor([2., 2., 2.], device='lowbit_sim:1')
"""

from __future__ import annotations

from lowbit.devices.simulated.enabling import enable, enabled
from lowbit.devices.simulated.faults import inject, launches, live_bytes, recover, usage

__all__ = ["enable", "enabled", "inject", "launches", "live_bytes", "recover", "usage"]
