# SPDX-License-Identifier: Apache-2.0
"""Programs for Windows on x86-64: compiled by mingw-w64, run under wine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = "x86_64-w64-mingw32-g++-posix"


WINE = ROOT / "tools/wine"


def needs(wine: bool = True) -> None:
    """Skip the test that calls this where there is no compiler, or no wine that it asks for."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} on this machine: tools/test_env --only windows")
    if wine and subprocess.run([WINE, "--version"], capture_output=True).returncode == 77:
        pytest.skip("no wine64 on this machine: tools/test_env --only windows")


def compiled(program: Path, sources: list[Path], *flags: str) -> None:
    command = [COMPILER, "-std=c++20", f"-I{ROOT / 'csrc'}", *flags, *map(str, sources), "-static", "-lsynchronization"]
    subprocess.run([*command, "-o", str(program)], check=True)


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(WINE), str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def path(of: Path) -> str:
    """The name of a file in wine, which shows this machine's files as drive Z."""
    return "Z:" + str(of).replace("/", "\\")
