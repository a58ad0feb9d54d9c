# SPDX-License-Identifier: Apache-2.0
"""The name of the device, in one place."""

from __future__ import annotations

DEVICE = "lowbit_sim"
