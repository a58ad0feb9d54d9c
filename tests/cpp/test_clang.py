# SPDX-License-Identifier: Apache-2.0
"""clang compiles the public headers, csrc/core, a unit of the library and one of the kernels without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
PUBLIC = ROOT / "python/lowbit/include/lowbit"
SCALAR = ["-DLOWBIT_ISA_NAME=scalar", '-DLOWBIT_ISA_HEADER="cpu/simd/scalar.hpp"']
C_HEADERS = [PUBLIC / name for name in ("types.h", "lowbit.h", "backend.h")]
UNITS = {
    "public headers, C": (["-x", "c", "-std=c11"], C_HEADERS),
    "public headers, C++": (["-x", "c++", "-std=c++20"], sorted(PUBLIC.glob("*.h"))),
    "csrc/core": (["-x", "c++", "-std=c++20"], [*sorted(CSRC.glob("core/*.cpp")), *(CSRC / f"core/os/{name}.cpp" for name in ("posix", "linux"))]),
    "csrc/external": (["-x", "c++", "-std=c++20"], sorted(CSRC.glob("external/*.cpp"))),
    "a unit of kernels": (["-x", "c++", "-std=c++20", *SCALAR], [CSRC / "cpu/linear/dot.cpp"]),
    "blocks of GGUF": (["-x", "c++", "-std=c++20", *SCALAR], [CSRC / "cpu/quantize/gguf.cpp"]),
}


@pytest.mark.parametrize("unit", UNITS)
def test_clang_compiles_without_a_warning(unit: str) -> None:
    clang = next(
        (path for name in ("clang", *(f"clang-{n}" for n in range(30, 14, -1))) if (path := shutil.which(name))), None
    )
    if clang is None:
        pytest.skip("no clang on this machine: it compiles the sources that gcc compiles too")
    flags, sources = UNITS[unit]
    flags = [*flags, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{PUBLIC.parent}"]
    text = "".join(f'#include "{source}"\n' for source in sources)
    done = subprocess.run([clang, *flags, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
