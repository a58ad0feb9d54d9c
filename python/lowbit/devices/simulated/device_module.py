# SPDX-License-Identifier: Apache-2.0
"""`torch.lowbit_sim`."""

from __future__ import annotations

from lowbit.devices.private_use.device_module import DeviceModule


class SimulatedModule(DeviceModule):
    """Devices without a name of their own."""

    def name_of(self, index: int) -> str:
        return f"lowbit simulated device {index}"
