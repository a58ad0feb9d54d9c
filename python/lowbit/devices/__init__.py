# SPDX-License-Identifier: Apache-2.0
"""The devices that lowbit's ops run on (`list()`, `check()`, `prebuild()`), and devices that lowbit adds to torch:
`simulated.enable()` and `level_zero.enable()`, which are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from lowbit.devices.cuda import prebuild
from lowbit.devices.places import check, has_kernels, list

if TYPE_CHECKING:
    from lowbit.devices import level_zero, simulated

__all__ = ["check", "has_kernels", "level_zero", "list", "prebuild", "simulated"]


def __getattr__(name: str) -> ModuleType:
    if name in ("level_zero", "simulated"):
        return importlib.import_module(f"lowbit.devices.{name}")
    raise AttributeError(f"module 'lowbit.devices' has no attribute {name!r}")
