# SPDX-License-Identifier: Apache-2.0
"""Threads that stay together over many regions (csrc/core/team.hpp), under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_a_team_runs_every_part_once_and_hands_on_what_fails(tmp_path: Path) -> None:
    compiler, setarch = shutil.which("g++"), shutil.which("setarch")
    if compiler is None or setarch is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    program = tmp_path / "team"
    core = ("cpu_quota", "error", "os/posix", "os/linux")
    sources = [HERE / "team.cpp", *(ROOT / f"csrc/core/{name}.cpp" for name in core)]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-Wno-tsan", f"-I{ROOT / 'csrc'}", "-ldl", "-pthread"]
    subprocess.run([compiler, *sources, *flags, "-o", program], check=True)
    # Without random addresses: this gcc's runtime does not know all places that a new kernel may take.
    done = subprocess.run(
        [setarch, "-R", program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "4"}
    )
    assert (done.returncode, done.stdout) == (0, "a team holds\n"), done.stdout + done.stderr
