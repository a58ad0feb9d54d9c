# SPDX-License-Identifier: Apache-2.0
"""Functions of liblowbit that Python has no use for but tests have, as a module of pybind11 that is compiled when a
test first asks for one: ops by their contract (`decode` into given tensors, with mods and a log-sum-exp; a score
program over a tile), score programs as SPIR-V, what the CUDA and oneDNN backends make and keep, and
the state of the threads.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests import kept

from lowbit import _C

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
LIBRARY = Path(_C.__file__).parent
FLAGS = (
    "-std=c++20 -O0 -w -fPIC -fvisibility=hidden -shared",
    f"-I{CSRC} -I{LIBRARY / 'include'} -I{Path(torch.__file__).parent / 'include'}",  # torch has pybind11's headers
    f"-I{sysconfig.get_paths()['include']}",
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(loaded(), name)


@functools.cache
def loaded() -> ModuleType:
    """The module, made where no run before this one did."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine: it compiles tests/internals")
    sources = [*sorted(HERE.glob("*.cpp")), *(CSRC / "bindings" / name for name in ("tensor_caster.cpp", "errors.cpp"))]
    whole = "".join(f'#include "{path}"\n' for path in sources)  # one file: pybind11's headers are most of the time

    def make(folder: Path) -> None:
        libraries = ["-x", "none", f"-L{LIBRARY}", "-l:liblowbit.so", f"-Wl,-rpath,{LIBRARY}"]
        command = ["g++", *" ".join(FLAGS).split(), "-x", "c++", "-", *libraries, "-o", str(folder / "internals.so")]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # of tools/sanitize
        subprocess.run(command, input=whole, text=True, check=True, env=environment)

    sources += CSRC.rglob("*.hpp")
    path = str(kept.folder("internals", sources, FLAGS, make=make) / "internals.so")
    loader = importlib.machinery.ExtensionFileLoader("internals", path)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("internals", loader, origin=path))
    loader.exec_module(module)
    return module
