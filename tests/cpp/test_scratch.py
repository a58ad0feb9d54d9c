# SPDX-License-Identifier: Apache-2.0
"""The scratch memory of a thread (csrc/core/scratch.hpp), with and without AddressSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("sanitized", [False, True])
def test_pieces_nest_are_kept_and_end_where_they_end(tmp_path: Path, sanitized: bool) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    program = tmp_path / "scratch"
    flags = ["-std=c++20", "-O1", "-g", f"-I{ROOT / 'csrc'}", "-pthread"] + ["-fsanitize=address"] * sanitized
    sources = [HERE / "scratch.cpp", ROOT / "csrc/core/scratch.cpp"]
    subprocess.run([compiler, *sources, *flags, "-o", program], check=True)
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"}
    done = subprocess.run([program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "a stack holds\n"), done.stdout + done.stderr
