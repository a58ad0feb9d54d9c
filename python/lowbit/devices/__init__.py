# SPDX-License-Identifier: Apache-2.0
"""Where lowbit's ops run: `list()`, `check()`, `prebuild()`; devices that lowbit makes known to torch:
`simulated.enable()`, `level_zero.enable()`, which are loaded at first use."""

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
