# SPDX-License-Identifier: Apache-2.0
"""The mechanism that adds a device of lowbit to torch, shared by the simulated device and Level Zero.

torch has one dispatch key for external devices (PrivateUse1), so a process has at most one. torch's ops run their CPU
kernels on the device's memory; lowbit's ops run kernel rows of the device.
"""

from __future__ import annotations
