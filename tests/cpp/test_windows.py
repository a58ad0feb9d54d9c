# SPDX-License-Identifier: Apache-2.0
"""Windows on x86-64, by mingw-w64: what asks the system for something compiles, and programs run under wine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import cross_built
import for_windows
import pytest
from for_windows import COMPILER

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
# What asks the system for something. Files of a list are one translation unit.
UNITS = {
    "core": sorted(CSRC.glob("core/*.cpp")),
    **{f"core/os/{name}": [CSRC / f"core/os/{name}.cpp"] for name in ("windows", "msvc_exception")},
    "external": sorted(CSRC.glob("external/*.cpp")),
    "sim": sorted(CSRC.glob("sim/*.cpp")),
    **{f"recorder/{name}": [CSRC / f"recorder/{name}.cpp"] for name in ("folder", "ring", "watcher")},
}


@pytest.mark.parametrize("unit", UNITS)
def test_what_asks_the_system_compiles(unit: str) -> None:
    for_windows.needs(wine=False)
    text = "".join(f'#include "{source}"\n' for source in UNITS[unit])
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{CSRC}", f"-I{ROOT / 'python/lowbit/include'}"]
    done = subprocess.run([COMPILER, "-x", "c++", *flags, *include, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["team", "scratch"])
def test_threads_and_their_memory(name: str, tmp_path: Path) -> None:
    for_windows.needs()
    core = ("cpu_quota", "error", "os/windows") if name == "team" else ("scratch",)
    program = tmp_path / f"{name}.exe"
    for_windows.compiled(program, [HERE / f"{name}.cpp", *(CSRC / f"core/{source}.cpp" for source in core)], "-O1")
    done = for_windows.run(program, OMP_NUM_THREADS="4")
    assert (done.returncode, done.stdout) == (0, f"a {'team' if name == 'team' else 'stack'} holds\n"), done.stdout + done.stderr


def test_a_c_program_writes_the_bytes_of_linux() -> None:
    cross_built.skip_without("windows/csrc/liblowbit.dll", "windows")
    for_windows.needs()
    done = subprocess.run([ROOT / "tools/windows", "--objects"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("the bytes of Linux") == 3, done.stdout + done.stderr


def test_ops_are_within_budget_of_float64_under_wine() -> None:
    cross_built.skip_without("windows/python/lowbit/liblowbit.dll", "windows")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT_ISA", "PYTEST_"))}
    cross_built.run_tests("windows_python", "tests/ops/test_rms_norm.py", "_avx2 and not _avx2_vnni", environment)
