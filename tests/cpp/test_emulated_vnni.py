# SPDX-License-Identifier: Apache-2.0
"""The avx512_vnni tiles through a scalar emulation of their trait, for machines without VNNI (tests/ops runs the real row where it is)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIBRARY = Path(_C.__file__).with_name("liblowbit.so")


def test_emulated_vnni_gives_the_bits_of_the_scalar_row(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    program = tmp_path / "emulated_vnni"
    sources = [HERE / "emulated_vnni.cpp", ROOT / "csrc/cpu/scratch.cpp"]
    # Nothing is inlined or optimised: seconds of compilation, where -O1 took minutes on a busy machine.
    flags = ["-std=c++20", "-O0", "-Dalways_inline=unused", "-ffp-contract=off", "-w", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *sources, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "648 cases\n"
