# SPDX-License-Identifier: Apache-2.0
"""Build shim.cpp for the torch that is loaded, once, and hand it the functions of liblowbit.

The built file is kept in the user's cache folder (LOWBIT_CACHE, XDG_CACHE_HOME, ~/.cache), named by torch's version and
the source: another torch, or another lowbit, builds its own. It takes some seconds; afterwards it is loaded in no time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from lowbit import _C

_SOURCE = Path(__file__).with_name("shim.cpp")
_TORCH = Path(torch.__file__).parent


def load(devices: int) -> None:
    """Register allocator and device guard of PrivateUse1 for ``devices`` devices.

    Raises:
        RuntimeError: no C++ compiler was found (CXX, c++, g++, clang++), or it failed (the text has its output).
    """
    library = ctypes.CDLL(str(_built()))
    addresses = _C.simulated.functions()
    library.lowbit_sim_register((ctypes.c_void_p * len(addresses))(*addresses), devices)


def _built() -> Path:
    source = _SOURCE.read_bytes()
    name = hashlib.sha256(source + torch.__version__.encode() + str(_TORCH).encode()).hexdigest()[:16]
    path = _cache() / f"simulated-{torch.__version__}-{name}.so"
    if not path.exists():
        _build(path)
    return path


def _cache() -> Path:
    home = os.environ.get("LOWBIT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"


def _build(path: Path) -> None:
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    abi = int(torch.compiled_with_cxx11_abi())
    with tempfile.TemporaryDirectory(
        dir=path.parent
    ) as folder:  # two processes may build at once: the last one in wins, with the same bytes
        made = Path(folder) / path.name
        command = [
            compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{_TORCH / 'include'}", str(_SOURCE), "-o", str(made), f"-L{_TORCH / 'lib'}", "-lc10",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"simulated.enable: {compiler} could not build {_SOURCE.name} for torch {torch.__version__}:\n"
                + done.stderr[-4000:]
            )
        os.replace(made, path)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError(
        "simulated.enable: needs a C++ compiler once, to build 150 lines for this torch (its allocator and device "
        "guard cannot be set from Python); found none of CXX, c++, g++, clang++"
    )
