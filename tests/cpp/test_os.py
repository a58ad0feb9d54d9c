# SPDX-License-Identifier: Apache-2.0
"""What lowbit asks of the system (csrc/core/os.hpp), on Linux and, under wine, on Windows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import for_windows
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def sources(*systems: str) -> list[Path]:
    return [HERE / "os.cpp", ROOT / "csrc/core/error.cpp", *(ROOT / f"csrc/core/os/{name}.cpp" for name in systems)]


def test_linux_does_what_is_asked(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the program is C++ and is compiled by this test")
    program = tmp_path / "os"
    flags = ["-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", "-ldl", "-pthread"]
    subprocess.run([compiler, *sources("posix", "linux"), *flags, "-o", program], check=True)
    arguments = [tmp_path, "libc.so.6", "malloc", "libresolv.so.2"]
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the system does what is asked\n"), done.stdout + done.stderr
    done = subprocess.run([program, "fault"], capture_output=True, text=True)
    assert done.returncode < 0 and (done.stdout, done.stderr) == ("", "touched\n")


def test_windows_does_what_is_asked(tmp_path: Path) -> None:
    for_windows.needs()
    program = tmp_path / "os.exe"
    for_windows.compiled(program, sources("windows"), "-O1")
    done = for_windows.run(program, for_windows.path(tmp_path), "kernel32.dll", "GetTickCount", "version.dll")
    assert (done.returncode, done.stdout) == (0, "the system does what is asked\n"), done.stdout + done.stderr
    done = for_windows.run(program, "fault")
    assert done.returncode != 0 and done.stdout == "" and "touched" in done.stderr
