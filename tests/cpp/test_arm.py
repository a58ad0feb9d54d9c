# SPDX-License-Identifier: Apache-2.0
"""Ops on 64-bit Arm against float64, under qemu: what tools/arm compiled, in the Python that it laid out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "tools/arm_python"
LIBRARY = ROOT / "build/arm/python/lowbit/liblowbit.so"
# A share of the core tests that takes a minute of one core each; an import of torch takes half of that.
SHARE = {
    "neon": ("tests/ops/test_rms_norm.py", "_neon and not _neon_dot"),
    "neon_dot": ("tests/ops/test_linear.py", "linear_int4_int8_neon_dot"),
}


def skip_without_what_the_tool_made() -> None:
    if not LIBRARY.exists():
        pytest.skip("no lowbit for Arm in build/arm: tools/arm")
    sources = [path for pattern in ("csrc/**/*.[ch]pp", "python/**/*.py") for path in ROOT.glob(pattern)]
    newer = [path for path in sources if path.stat().st_mtime > LIBRARY.stat().st_mtime]
    if newer:
        pytest.skip(f"lowbit for Arm in build/arm is older than {newer[0].relative_to(ROOT)}: tools/arm")
    found = subprocess.run([PYTHON, "--folder"], capture_output=True, text=True)
    if found.returncode == 77:
        pytest.skip("no Python for Arm: tools/arm")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("isa", SHARE)
def test_ops_are_within_budget_of_float64_under_qemu(isa: str) -> None:
    skip_without_what_the_tool_made()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT_", "PYTEST_"))}
    # Not a Cortex-A53, as for programs of C: torch's wheel ends by an illegal instruction there.
    environment |= {"LOWBIT_ISA": isa, "QEMU_CPU": "neoverse-n1"}
    file, names = SHARE[isa]
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "core", file, "-k", names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
