# SPDX-License-Identifier: Apache-2.0
"""A run ends with a table of what was skipped; a reason that is not on the list fails it, also in a nested run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import skips
from nested import Run

KNOWN = "no NVIDIA GPU: as a test says it"
NEW = "a reason that is on no list"
TESTS = Path(__file__).parents[1]


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(f"import pytest\ndef test_that_passes(): pass\n{text}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "skips", "-c", "/dev/null", "--rootdir", str(folder), *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [("-p", "no:xdist"), ("-n2",)], ids=["one process", "xdist"])
def test_known_reasons_are_counted_by_line_and_new_ones_fail(options: tuple[str, ...], tmp_path: Path) -> None:
    if options == ("-n2",):
        pytest.importorskip("xdist")
    known = f"@pytest.mark.parametrize('i', range(3))\ndef test_known(i): pytest.skip({KNOWN!r})\n"
    done = run(tmp_path, known + f"@pytest.mark.skipif(True, reason={NEW!r})\ndef test_new(): pass\n", *options)
    assert done.returncode == 1 and f"     1  {NEW}  <- not in tests/known_skips.txt" in done.stdout, done.stdout
    assert "     3  needs an NVIDIA GPU\n" in done.stdout


def test_a_file_that_is_skipped_whole_counts(tmp_path: Path) -> None:
    done = run(tmp_path, "pytest.importorskip('a_package_that_is_nowhere')\n", "-p", "no:xdist")
    assert "     1  a package of" in done.stdout and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


def test_skips_of_a_nested_run_reach_the_outer_one(tmp_path: Path, nested: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    (tmp_path / "test_inner.py").write_text(f"import pytest\ndef test_that_passes(): pass\ndef test_known(): pytest.skip({KNOWN!r})\n")
    done = nested("-p", "share", "-p", "skips", "-p", "nested", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path, PYTHONPATH=str(TESTS))
    assert done.code == 0 and done.passed == 1 and "     1  needs an NVIDIA GPU\n" in done.said, str(done)
    assert nested.skipped == {KNOWN: 1}  # type: ignore[attr-defined]
    nested.skipped.clear()  # type: ignore[attr-defined]


def test_every_line_of_the_list_has_a_pattern_and_a_reason() -> None:
    assert len(skips.known()) > 10 and all(pattern.pattern and why for pattern, why in skips.known())
