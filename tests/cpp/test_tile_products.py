# SPDX-License-Identifier: Apache-2.0
"""Products of two float matrices (csrc/cpu/tile_products.hpp) on every instruction set that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AVX2 = ("-mavx2", "-mfma", "-mf16c")
FLAGS = {"scalar": (), "avx2": AVX2, "avx512": (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}


@pytest.mark.parametrize("isa", FLAGS)
def test_products_of_tiles_are_sums_of_float64(tmp_path: Path, isa: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    best_first, detected = _C.isa()["compiled"], _C.isa()["detected"]
    if best_first.index(isa) < best_first.index(detected):
        pytest.skip(f"this machine has {detected} only")
    program = tmp_path / "tile_products"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", f"-I{ROOT / 'csrc'}", *FLAGS[isa]]
    flags += [f"-DLOWBIT_ISA_NAME={isa}", f'-DLOWBIT_ISA_HEADER="cpu/simd/{isa}.hpp"']
    subprocess.run([compiler, *flags, HERE / "tile_products.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1212 cases\n"), done.stdout + done.stderr
