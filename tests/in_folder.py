# SPDX-License-Identifier: Apache-2.0
"""Modules of the tree that are no part of the package: of tools and of benchmarks, which import one another by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def module_in(folder: str, name: str) -> ModuleType:
    """Import a module as a program of its folder would."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / folder))
