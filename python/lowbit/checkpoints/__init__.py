# SPDX-License-Identifier: Apache-2.0
"""File and weight formats that other projects define: GGUF, MXFP4 and NVFP4, checkpoints of transformers. Nothing here
is imported unless it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("gguf", "microscaling"):
        return importlib.import_module(f"lowbit.checkpoints.{name}")
    raise AttributeError(f"module 'lowbit.checkpoints' has no attribute {name!r}")
