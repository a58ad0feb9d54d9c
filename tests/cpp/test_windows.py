# SPDX-License-Identifier: Apache-2.0
"""Windows on x86-64: what asks the system for something compiles by mingw-w64. Nothing runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = "x86_64-w64-mingw32-g++-posix"
CSRC = ROOT / "csrc"
# What asks the system for something. Files of a list are one translation unit.
UNITS = {
    "core": sorted(CSRC.glob("core/*.cpp")),
    "core/os": [CSRC / "core/os/windows.cpp"],
    "external": sorted(CSRC.glob("external/*.cpp")),
    "sim": sorted(CSRC.glob("sim/*.cpp")),
    **{f"recorder/{name}": [CSRC / f"recorder/{name}.cpp"] for name in ("folder", "ring", "watcher")},
}


@pytest.mark.parametrize("unit", UNITS)
def test_what_asks_the_system_compiles(unit: str) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} on this machine: tools/test_env --only windows")
    text = "".join(f'#include "{source}"\n' for source in UNITS[unit])
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{CSRC}", f"-I{ROOT / 'python/lowbit/include'}"]
    done = subprocess.run([COMPILER, "-x", "c++", *flags, *include, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
