# SPDX-License-Identifier: Apache-2.0
"""Packed models as programs of other runtimes, ONNX and ExecuTorch. Nothing here is imported unless it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("executorch", "onnx"):
        return importlib.import_module(f"lowbit.export.{name}")
    raise AttributeError(f"module 'lowbit.export' has no attribute {name!r}")
