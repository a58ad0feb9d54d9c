# SPDX-License-Identifier: Apache-2.0
"""`pytest` alone takes the share of a quick run on all cores; what is named runs whole; all of it in a small suite of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITE = """
import os, pytest
@pytest.mark.core
@pytest.mark.parametrize("i", range(10))
def test_core(i): pass
@pytest.mark.parametrize("i", range(240))
def test_variants(i): pass
def test_workers(): assert bool(os.environ.get("PYTEST_XDIST_WORKER")) == bool(os.environ["WANTED_WORKERS"])
"""


@pytest.mark.parametrize(
    "options, workers, fewest, most",
    [
        ("", "1", 13, 60),  # 12 and one in 12 of 240
        ("-n0", "", 13, 60),
        ("-n0 --share 2", "", 90, 180),
        ("-n2 --share 2 --share-seed another", "1", 90, 180),
        ("-n2 --everything", "1", 251, 251),
        ("tests", "", 251, 251),
        ("-k test_core", "", 10, 10),
    ],
)
def test_what_runs(options: str, workers: str, fewest: int, most: int, tmp_path: Path) -> None:
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\nmarkers = ["core: of every run"]\n')
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["share", "skips", "nested"]\n')
    (tmp_path / "tests" / "test_some.py").write_text(SUITE)
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LOWBIT_TEST_"))}
    environment = unset | {"PYTHONPATH": str(TESTS), "WANTED_WORKERS": workers, "LOWBIT_TEST_SEED": "a-seed"}
    command = [sys.executable, "-m", "pytest", "-q", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert fewest <= passed <= most, done.stdout
    left_out = re.search(r"share: one variant in \d+ \(by --share-seed (a-seed|another)\): (\d+) left out", done.stdout)
    assert left_out is None or left_out[1] == ("another" if "another" in options else "a-seed")
    assert (int(left_out[2]) if left_out else 0) == (0 if options == "-k test_core" else 251 - passed), done.stdout
