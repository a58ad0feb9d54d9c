# SPDX-License-Identifier: Apache-2.0
"""The simulated device: each file of simulated/ runs in a process of its own, because enabling it cannot be undone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit import _C

CHECKS = Path(__file__).parent / "simulated"
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the simulated device needs a C++ compiler once"
)


def passed(file: str, **environment: str) -> int:
    """Run a file of checks; return how many passed, fail if one failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(CHECKS / file)],
        env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.parametrize(
    "file", sorted(path.name for path in CHECKS.glob("check_*.py") if path.name != "check_torch_ops.py")
)
def test_checks(file: str) -> None:
    assert passed(file) > 0


def rows_that_ran(every: int, *tests: str) -> set[str]:
    """Run a share of tests of the ops on the device; return the rows that did."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *tests],
        env=os.environ | {"LOWBIT_TEST_DEVICE": "lowbit_sim:1", "LOWBIT_TEST_EVERY": str(every)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return set(re.search(r"rows that ran on lowbit_sim:1: (.*)", done.stdout)[1].split())


def test_the_ops_pass_their_tests_there_by_rows_of_the_device() -> None:
    """A share of tests/ops, without what takes long: every op runs there, in memory that only its row may touch."""
    ops, score = (str(CHECKS.parents[1] / name) for name in ("ops", "score"))
    ran = rows_that_ran(60, ops, score, "-k", "not long_sums and not extremes")
    ran |= rows_that_ran(8, f"{ops}/test_blocks.py")  # which has two ops of few tests: a larger share, or none may be in it
    for op in set(_C.OPS) - {"repack", "dequantize"}:  # hardly called by tests/ops; check_lowbit.py does
        rows = [str(row["name"]) for row in _C.kernels(op) if row["device"] == "lowbit_sim"]
        assert set(rows) & ran, f"no row of {op} ran there"


def test_ops_of_torch_give_on_the_device_what_they_give_on_the_cpu() -> None:
    assert passed("check_torch_ops.py", PYTORCH_PRINT_REPRO_ON_FAILURE="0", OMP_NUM_THREADS="1") >= 660


def test_host_code_that_touches_device_memory_dies_and_is_told_why() -> None:
    code = """
import ctypes, torch
from lowbit.devices import simulated
simulated.enable()
x = torch.ones(4, device="lowbit_sim:1")
print(ctypes.c_float.from_address(x.data_ptr()).value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -11 and done.stdout == ""
    assert "lowbit_sim:1: host code touched device memory outside a run" in done.stderr


def test_the_environment_enables_it_at_import_and_autoload_never_does() -> None:
    name = "print(torch._C._get_privateuse1_backend_name())"
    code = f"import torch; {name}; import lowbit; {name}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"LOWBIT_SIM": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["privateuseone", "lowbit_sim"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["privateuseone", "privateuseone"]


def test_enabling_too_late_says_so() -> None:
    code = """
import torch
from lowbit.devices import simulated
torch.ones(1, requires_grad=True).sum().backward()
try:
    simulated.enable()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "simulated.enable: must come before the first backward() of the process"


def test_without_a_compiler_nothing_is_registered_and_the_error_says_what_is_needed(tmp_path: Path) -> None:
    code = """
import torch
from lowbit.devices import simulated
try:
    simulated.enable()
except RuntimeError as error:
    print(error, torch._C._get_privateuse1_backend_name(), simulated.enabled())
"""
    environment = os.environ | {"LOWBIT_CACHE": str(tmp_path), "PATH": "", "CXX": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "needs a C++ compiler once" in done.stdout and done.stdout.strip().endswith("privateuseone False")
