# SPDX-License-Identifier: Apache-2.0
"""Export of packed models to other runtimes: ONNX and ExecuTorch. Submodules are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("executorch", "onnx"):
        return importlib.import_module(f"lowbit.export.{name}")
    raise AttributeError(f"module 'lowbit.export' has no attribute {name!r}")
