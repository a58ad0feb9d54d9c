# SPDX-License-Identifier: Apache-2.0
"""The name of the device."""

from __future__ import annotations

DEVICE = "lowbit_sim"
