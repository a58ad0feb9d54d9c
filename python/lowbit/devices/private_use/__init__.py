# SPDX-License-Identifier: Apache-2.0
"""How a device of ours becomes one of torch's: the mechanism that the simulated device and Level Zero share.

torch has one key for a device that is not its own (PrivateUse1), so a process has at most one. Ops of torch
run by their CPU kernels over the device's memory, ops of lowbit by rows of the device.
"""

from __future__ import annotations
