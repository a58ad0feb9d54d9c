# SPDX-License-Identifier: Apache-2.0
"""Where lowbit's ops run: `list()`, `check()`, `prebuild()`; how others find lowbit; simulated devices."""

from __future__ import annotations

from lowbit.devices.cuda import prebuild
from lowbit.devices.places import check, has_kernels, list

__all__ = ["check", "has_kernels", "list", "prebuild"]
