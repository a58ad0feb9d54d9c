# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers, attention and low-memory optimizers for PyTorch on the CPU, in eager mode, with no compiler
on your machine.

Example:
    >>> import torch, lowbit
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    >>> report = lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))

Public names are loaded at first use (the table is `__init__.pyi`): `import torch` imports this package by its autoload
entry point, and must stay quick. Importing registers the ops `torch.ops.lowbit.*`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _torch = None  # `import lowbit._C` works; every public name raises an error that names torch

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(f"lowbit needs a Python with the GIL, got a free-threaded Python {sys.version.split()[0]}")

from lowbit import _C

__version__ = _C.version
_C.look_in(sys.path)  # pip puts NVIDIA's libraries and oneDNN there; nothing is opened here

if _torch is not None:
    from lowbit.ops.registration import register
    from lowbit.peers.when_imported import join_when_imported

    register()
    join_when_imported()
    del register, join_when_imported
    if _C.recorder.state()["on"]:
        from lowbit.recorder import join_ranks

        join_ranks()
        del join_ranks
    if os.environ.get("LOWBIT_SIM") == "1":
        from lowbit.devices import simulated

        simulated.enable()


@functools.cache
def _home() -> dict[str, str]:
    """The module of each public name, as `__init__.pyi` has them, which type checkers read too."""
    lines = ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    return {name.asname: line.module for line in lines if isinstance(line, ast.ImportFrom) for name in line.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _home():
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}{_instead(name)}")
    if _torch is None:
        raise ImportError(f'lowbit.{name} needs PyTorch, which is not installed: pip install "lowbit[torch]"')
    if _home()[name] == "lowbit":
        return importlib.import_module(f"lowbit.{name}")
    value = getattr(importlib.import_module(_home()[name]), name)
    globals()[name] = value
    return value


def _instead(name: str) -> str:
    """The error's advice for a name that is not here: what replaces a name of torchao or bitsandbytes, or the nearest."""
    if name.startswith("_") or _torch is None:  # asked for by inspect, pickle and others
        return ""
    from lowbit.formats.nearest import nearest
    from lowbit.formats.torchao import INSTEAD

    return f"; use {INSTEAD[name]}" if name in INSTEAD else nearest(name, _home())


def __dir__() -> list[str]:
    return sorted([*_home(), "__version__"])
