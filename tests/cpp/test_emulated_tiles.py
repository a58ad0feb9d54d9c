# SPDX-License-Identifier: Apache-2.0
"""The units of avx512_vnni and amx through a scalar emulation of their traits, for machines without them (tests/ops runs
the real rows where they are)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIBRARY = Path(_C.__file__).with_name("liblowbit.so")


@pytest.mark.parametrize(
    ("unit", "emulation", "m"),
    [("dot", "emulated_vnni", "{1, 2, 5, 6, 7, 19}"), ("amx", "emulated_amx", "{16, 17, 33, 40}")],
)
def test_an_emulated_unit_gives_the_bits_of_the_scalar_row(tmp_path: Path, unit: str, emulation: str, m: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    program = tmp_path / "emulated"
    sources = [HERE / "emulated_tiles.cpp", ROOT / "csrc/cpu/scratch.cpp"]
    # Nothing is inlined or optimised: seconds of compilation, where -O1 took minutes on a busy machine.
    flags = ["-std=c++20", "-O0", "-Dalways_inline=unused", "-ffp-contract=off", "-w", f"-I{ROOT / 'csrc'}"]
    flags += [f'-DLOWBIT_ISA_HEADER="../tests/cpp/{emulation}.hpp"', f'-DLOWBIT_UNIT="cpu/linear/{unit}.cpp"']
    flags += [f"-DLOWBIT_UNIT_ROWS=linear_{unit}_rows", f"-DLOWBIT_UNIT_M={m}"]
    subprocess.run([compiler, *flags, *sources, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{108 * m.count(',') + 108} cases\n"
