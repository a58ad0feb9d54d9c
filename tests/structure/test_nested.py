# SPDX-License-Identifier: Apache-2.0
"""Functions of a file that runs in a process of its own are chosen, fail and skip by their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OUTER = """
from pathlib import Path
import pytest
from nested import checks

@pytest.mark.parametrize("check", checks(Path(__file__).with_name("check_some.py")), ids=str)
def test_checks(check, passes):
    passes(check, LOWBIT_ISA="scalar")
"""
SOME = """
import os, pytest
with open("runs", "a") as runs: runs.write(os.environ["LOWBIT_ISA"] + ";")

def test_that_passes(): pass

@pytest.mark.parametrize("i", range(3))
def test_one_fails(i): assert i != 1, f"because of {i}"

def test_that_skips(): pytest.skip("no NVIDIA GPU: as a test says it")
"""
DIES = SOME + "def test_that_dies(): os._exit(7)\n"


def run(folder: Path, some: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_outer.py").write_text(OUTER)
    (folder / "check_some.py").write_text(some)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p share -p skips -p nested"\n')
    merged = os.environ | environment | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:xdist", "test_outer.py", *options]
    return subprocess.run(command, cwd=folder, env=merged, capture_output=True, text=True, check=False)


def test_each_function_has_its_own_outcome(tmp_path: Path) -> None:
    said = run(tmp_path, SOME).stdout
    assert "PASSED test_outer.py::test_checks[check_some-that_passes]" in said, said
    assert "FAILED test_outer.py::test_checks[check_some-one_fails]" in said and "because of 1" in said and "because of 2" not in said
    assert "1 failed, 1 passed, 1 skipped" in said and "needs an NVIDIA GPU" in said
    assert (tmp_path / "runs").read_text() == "scalar;", "the file runs once"


@pytest.mark.parametrize("which, outcome", [("passes", "1 passed"), ("fails", "1 failed"), ("skips", "1 skipped")])
def test_one_is_chosen_by_name(which: str, outcome: str, tmp_path: Path) -> None:
    said = run(tmp_path, DIES, "-k", which).stdout
    assert f"{outcome}, 3 deselected" in said, said


def test_variants_are_chosen_by_the_environment(tmp_path: Path) -> None:
    said = run(tmp_path, SOME, LOWBIT_TEST_NESTED="-k one_fails[2]").stdout
    assert "1 passed, 2 skipped" in said and "PASSED test_outer.py::test_checks[check_some-one_fails]" in said, said
    assert "3 failed" in run(tmp_path, SOME, LOWBIT_TEST_NESTED="-k nothing").stdout


def test_a_process_that_dies_fails_them_all(tmp_path: Path) -> None:
    said = run(tmp_path, DIES).stdout
    assert "4 failed" in said and "exit 7" in said and "test_that_dies" in said, said
