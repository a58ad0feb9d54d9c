# SPDX-License-Identifier: Apache-2.0
"""The units of avx512_vnni and amx through a scalar emulation of their traits, for machines without them (tests/ops
runs the real rows where they are)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from lowbit import _C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIBRARY = Path(_C.__file__).with_name("liblowbit.so")


INT8 = ("int8_group", "int8_row", "int8_row_asymmetric")


def printed_by(program: Path, emulation: str, sources: Sequence[str], definitions: Sequence[str]) -> str:
    """Compile `sources` of csrc with tests/cpp/<program>.cpp, run it, and return what it says."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    files = [HERE / f"{program.name}.cpp", *(ROOT / "csrc" / name for name in sources)]
    # Nothing is inlined or optimised: seconds of compilation, where -O1 took minutes on a busy machine.
    flags = ["-std=c++20", "-O0", "-Dalways_inline=unused", "-ffp-contract=off", "-w", f"-I{ROOT / 'csrc'}"]
    flags += ["-DLOWBIT_ISA_NAME=emulated", f'-DLOWBIT_ISA_HEADER="../tests/cpp/{emulation}.hpp"', *definitions]
    subprocess.run([compiler, *flags, *files, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("unit", "emulation", "rows", "x_formats", "definitions"),
    [
        ("dot", "emulated_vnni", (1, 2, 5, 6, 7, 19), INT8, ()),
        ("tiled_codes", "emulated_amx", (16, 17, 70), INT8, ()),
        ("amx", "emulated_amx", (16, 17, 70), ("floating",), ()),
        ("tiled_codes", "emulated_amx", (16, 17, 70), INT8, ("-DLOWBIT_ROWS_TOGETHER=2", "-DLOWBIT_TILE_SUM=int32_t")),
        ("amx", "emulated_amx", (16, 17, 70), ("floating",), ("-DLOWBIT_ROWS_TOGETHER=2", "-DLOWBIT_TILE_SUM=float")),
    ],
    ids=["dot", "tiled_codes-amx", "amx-amx", "tiled_codes-neon", "amx-neon"],
)
def test_an_emulated_unit_gives_what_the_scalar_row_gives(
    tmp_path: Path,
    unit: str,
    emulation: str,
    rows: tuple[int, ...],
    x_formats: tuple[str, ...],
    definitions: tuple[str, ...],
) -> None:
    definitions = [*definitions, f'-DLOWBIT_UNIT="cpu/linear/{unit}.cpp"', f"-DLOWBIT_UNIT_ROWS=linear_{unit}_rows"]
    definitions += [f"-DLOWBIT_UNIT_M={{{','.join(map(str, rows))}}}"]
    definitions += [f"-DLOWBIT_UNIT_X_FORMATS={{{','.join(f'XFormat::{name}' for name in x_formats)}}}"]
    sources = ["core/scratch.cpp", "cpu/linear/weight_order.cpp"]
    printed = printed_by(tmp_path / "emulated_tiles", emulation, sources, definitions)
    floats = 3 * sum(m >= 64 for m in rows) if "floating" in x_formats else 0
    assert printed == f"{len(rows) * 36 * len(x_formats) + floats} cases\n"


def test_attention_by_emulated_tiles_gives_what_the_scalar_row_gives(tmp_path: Path) -> None:
    memory = ["core/scratch.cpp", "cpu/attention/in_memory.cpp", "cpu/attention/captured_gradients.cpp"]
    sources = [*memory, "cpu/score_program/machine.cpp"]
    assert printed_by(tmp_path / "emulated_attention", "emulated_amx", sources, []) == "16 cases\n"
