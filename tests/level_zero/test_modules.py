# SPDX-License-Identifier: Apache-2.0
"""The SPIR-V in the tree is what its sources give, and what old drivers read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib

import pytest
from modules import ROOT, SPIRV

MODULES = sorted(path.stem for path in SPIRV.glob("*.spv"))
MOST_BYTES = 1_200_000
"""Of all modules as a wheel has them, deflated."""


def test_modules_are_small() -> None:
    assert MODULES and sum(len(zlib.compress((SPIRV / f"{name}.spv").read_bytes())) for name in MODULES) < MOST_BYTES


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_spirv_1_2_or_older(name: str) -> None:
    header = (SPIRV / f"{name}.spv").read_bytes()[:8]
    assert header[:4] == bytes.fromhex("03022307") and header[4:8] <= bytes([0, 2, 1, 0])


@pytest.mark.skipif(shutil.which("llvm-spirv-15") is None or shutil.which("clang-15") is None, reason="clang-15 or llvm-spirv-15 is not there")
def test_modules_are_what_their_sources_give() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "spirv"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
