# SPDX-License-Identifier: Apache-2.0
"""Products of two float matrices on every instruction set that this machine has (csrc/cpu/tile_products.hpp), and by
the tile units (csrc/cpu/part_products.hpp), of which that of amx is emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
FLAGS = {"scalar": (), "avx2": AVX2, "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512vnni")}


def printed_by(program: Path, isa: str, header: str, flags: tuple[str, ...]) -> str:
    """Compile tests/cpp/<program>.cpp for an instruction set, run it, and return what it says."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", f"-I{ROOT / 'csrc'}", *flags]
    options += [f"-DLOWBIT_ISA_NAME={isa}", f'-DLOWBIT_ISA_HEADER="{header}"']
    subprocess.run([compiler, *options, HERE / f"{program.name}.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("program", "isa", "cases"),
    [("tile_products", isa, 1260) for isa in ("scalar", "avx2", "avx512")] + [("part_products", "avx512_bf16", 432)],
)
def test_products_of_tiles_are_sums_of_float64(tmp_path: Path, program: str, isa: str, cases: int) -> None:
    best_first, detected = _C.isa()["compiled"], _C.isa()["detected"]
    if best_first.index(isa) < best_first.index(detected):
        pytest.skip(f"this machine has {detected} only")
    assert printed_by(tmp_path / program, isa, f"cpu/simd/{isa}.hpp", FLAGS[isa]) == f"{cases} cases\n"


def test_products_by_emulated_tiles_are_sums_of_float64(tmp_path: Path) -> None:
    printed = printed_by(tmp_path / "part_products", "emulated", "../tests/cpp/emulated_amx.hpp", ())
    assert printed == "432 cases\n"
