# SPDX-License-Identifier: Apache-2.0
"""Interoperation with other packages: weights and names of bitsandbytes and torchao, and integrations that load once a
package is imported. Submodules are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("bitsandbytes", "torchao"):
        return importlib.import_module(f"lowbit.peers.{name}")
    raise AttributeError(f"module 'lowbit.peers' has no attribute {name!r}")
