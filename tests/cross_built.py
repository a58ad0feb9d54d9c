# SPDX-License-Identifier: Apache-2.0
"""What a tool has compiled for another processor or system, for tests that run it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def skip_without(library: str, tool: str) -> None:
    """Skip the test that calls this unless `library`, a path in build/, is newer than the sources. `tool` made it, in tools/."""
    built = ROOT / "build" / library
    folder = f"build/{library.partition('/')[0]}"
    if not built.exists():
        pytest.skip(f"no lowbit in {folder}: tools/{tool}")
    sources = [path for pattern in ("csrc/**/*.[ch]pp", "python/**/*.py") for path in ROOT.glob(pattern)]
    newer = [path for path in sources if path.stat().st_mtime > built.stat().st_mtime]
    if newer:
        pytest.skip(f"lowbit in {folder} is older than {newer[0].relative_to(ROOT)}: tools/{tool}")


def run_tests(python: str, file: str, names: str, environment: dict[str, str]) -> None:
    """Run the core tests of a file whose names match, by the Python of tools/<python>. They must pass."""
    tool = ROOT / "tools" / python
    found = subprocess.run([tool, "--folder"], capture_output=True, text=True)
    if found.returncode == 77:
        pytest.skip(f"no Python in place: tools/{python} --lay-out")
    assert found.returncode == 0, found.stderr
    command = [tool, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "core", file, "-k", names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
