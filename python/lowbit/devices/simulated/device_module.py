# SPDX-License-Identifier: Apache-2.0
"""The module `torch.lowbit_sim`."""

from __future__ import annotations

from lowbit.devices.private_use.device_module import DeviceModule


class SimulatedModule(DeviceModule):
    """The module of devices that have no individual names."""

    def name_of(self, index: int) -> str:
        return f"lowbit simulated device {index}"
