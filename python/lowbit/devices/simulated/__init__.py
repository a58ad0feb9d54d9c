# SPDX-License-Identifier: Apache-2.0
"""`lowbit_sim`: devices that this machine does not have, for programs that must run on some, and for backends to come.

Each has memory of its own, which host code cannot touch; ops of torch run by their CPU kernels, ops of lowbit by its
own. See docs/simulated.md.

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
