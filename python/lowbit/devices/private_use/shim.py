# SPDX-License-Identifier: Apache-2.0
"""Build shim.cpp for the loaded version of torch, once, and pass it the functions of the device.

The library is kept in the user's cache folder (LOWBIT_CACHE, XDG_CACHE_HOME, ~/.cache) under a name with torch's
version and a hash of the source, so another version of torch or lowbit builds its own. The build takes some seconds.
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
from lowbit.devices.private_use import claimed

_SOURCE = Path(__file__).with_name("shim.cpp")
_TORCH = Path(torch.__file__).parent


def register(library: ctypes.CDLL) -> None:
    """Register the allocator and device guard of PrivateUse1 for the device in `_C.private_use`."""
    addresses = _C.private_use.functions()
    library.lowbit_register_device(
        (ctypes.c_void_p * len(addresses))(*addresses), _C.private_use.device_count(), claimed.name.encode()
    )


def built(asked_by: str) -> ctypes.CDLL:
    """Return the library of shim.cpp, building it if necessary. Nothing is registered.

    Raises:
        RuntimeError: no C++ compiler was found (CXX, c++, g++, clang++), or it failed; the message has its output.
    """
    source = _SOURCE.read_bytes()
    name = hashlib.sha256(source + torch.__version__.encode() + str(_TORCH).encode()).hexdigest()[:16]
    path = _cache() / f"private_use-{torch.__version__}-{name}.so"
    if not path.exists():
        _build(path, asked_by)
    return ctypes.CDLL(str(path))


def _cache() -> Path:
    home = os.environ.get("LOWBIT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"


def _build(path: Path, asked_by: str) -> None:
    compiler = _compiler(asked_by)
    path.parent.mkdir(parents=True, exist_ok=True)
    abi = int(torch.compiled_with_cxx11_abi())
    with tempfile.TemporaryDirectory(
        dir=path.parent
    ) as folder:  # if two processes build at once, the last replaces the file by the same bytes
        made = Path(folder) / path.name
        command = [
            compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{_TORCH / 'include'}", str(_SOURCE), "-o", str(made), f"-L{_TORCH / 'lib'}", "-lc10",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{asked_by}: {compiler} could not build {_SOURCE.name} for torch {torch.__version__}:\n"
                + done.stderr[-4000:]
            )
        os.replace(made, path)


def _compiler(asked_by: str) -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError(
        f"{asked_by}: needs a C++ compiler once, to build 150 lines for this torch (its allocator and device "
        "guard cannot be set from Python); found none of CXX, c++, g++, clang++"
    )
