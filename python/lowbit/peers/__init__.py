# SPDX-License-Identifier: Apache-2.0
"""lowbit inside other people's libraries. Nothing here is imported unless it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("bitsandbytes", "executorch", "gguf", "microscaling", "onnx", "torchao", "transformers"):
        return importlib.import_module(f"lowbit.integrations.{name}")
    raise AttributeError(f"module 'lowbit.integrations' has no attribute {name!r}")
