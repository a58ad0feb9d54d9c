# SPDX-License-Identifier: Apache-2.0
"""File and weight formats defined by other projects: GGUF, MXFP4 and NVFP4, and transformers checkpoints. Submodules
are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("gguf", "microscaling"):
        return importlib.import_module(f"lowbit.checkpoints.{name}")
    raise AttributeError(f"module 'lowbit.checkpoints' has no attribute {name!r}")
