# SPDX-License-Identifier: Apache-2.0
"""Packages beside which lowbit works: weights and names of bitsandbytes and torchao, and what joins lowbit to a package
once that is imported. Nothing here is imported unless it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("bitsandbytes", "torchao"):
        return importlib.import_module(f"lowbit.peers.{name}")
    raise AttributeError(f"module 'lowbit.peers' has no attribute {name!r}")
