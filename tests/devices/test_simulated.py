# SPDX-License-Identifier: Apache-2.0
"""The simulated device: each file of simulated/ runs in a process of its own, because enabling it cannot be undone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nested import Check, Run, checks

from lowbit import _C

CHECKS = Path(__file__).parent / "simulated"
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the simulated device needs a C++ compiler once"
)


@pytest.mark.core
@pytest.mark.parametrize("check", checks(*CHECKS.glob("check_*.py")), ids=str)
def test_checks(check: Check, passes: Callable[..., Run]) -> None:
    passes(check)


def test_the_ops_pass_their_tests_there_by_rows_of_the_device(nested: Callable[..., Run]) -> None:
    """A share of tests/ops, without what takes long: every op runs there, in memory that only its row may touch."""
    ops, score = (CHECKS.parents[1] / name for name in ("ops", "score"))
    done = nested(ops, score, "-k", "not long_sums and not extremes and not page_names", share=200, LOWBIT_TEST_DEVICE="lowbit_sim:1")
    assert done.code == 0, str(done)
    ran = set(re.search(r"rows that ran on lowbit_sim:1: (.*)", done.said)[1].split())
    for op in set(_C.OPS) - {"repack", "dequantize"}:  # hardly called by tests/ops; check_lowbit.py does
        rows = [str(row["name"]) for row in _C.kernels(op) if row["device"] == "lowbit_sim"]
        assert set(rows) & ran, f"no row of {op} ran there"


def test_ops_of_torch_give_on_the_device_what_they_give_on_the_cpu(nested: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    done = nested(CHECKS / "check_torch_ops.py", PYTORCH_PRINT_REPRO_ON_FAILURE="0", OMP_NUM_THREADS="1")
    assert done.code == 0 and done.passed >= 660 // request.config.option.share // 2, str(done)


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


@pytest.mark.parametrize("place, words", (("99", ""), ("100", "at byte 100 of a block of 100 bytes"), ("300", "at byte 300 of a block of 100 bytes")))
def test_a_run_that_writes_behind_a_block_ends_the_process_where_guards_are_asked_for(place: str, words: str) -> None:
    code = """
import ctypes, sys
import torch
from pathlib import Path
from lowbit import _C
from lowbit.devices import simulated
simulated.enable()
library = ctypes.CDLL(str(Path(_C.__file__).with_name("liblowbit.so")))
x, run = torch.ones(100, dtype=torch.uint8, device="lowbit_sim:1"), ctypes.create_string_buffer(64)
library._ZN6lowbit3sim4OpenC1EiPv(run, 1, None)
ctypes.memset(x.data_ptr() + int(sys.argv[1]), 1, 1)
library._ZN6lowbit3sim4OpenD1Ev(run)
print(x.sum().item())
"""
    command = [sys.executable, "-c", code, place]
    done = subprocess.run(command, env=os.environ | {"LOWBIT_SIM_GUARDS": "1"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((-6, "") if words else (0, "100\n")) and words in done.stderr, done


def test_the_environment_enables_it_at_import_and_autoload_never_does(python: Callable[..., str]) -> None:
    name = "print(torch._C._get_privateuse1_backend_name())"
    code = f"import torch; {name}; import lowbit; {name}"
    for environment, named in ({"LOWBIT_SIM": "1"}, "lowbit_sim"), ({}, "privateuseone"):
        told = python(code, **environment)
        assert told.split() == ["privateuseone", named], told


def test_enabling_too_late_says_so(python: Callable[..., str]) -> None:
    code = """
import torch
from lowbit.devices import simulated
torch.ones(1, requires_grad=True).sum().backward()
try:
    simulated.enable()
except RuntimeError as error:
    print(error)
"""
    assert python(code).strip() == "simulated.enable: must come before the first backward() of the process"


def test_without_a_compiler_nothing_is_registered_and_the_error_says_what_is_needed(python: Callable[..., str], tmp_path: Path) -> None:
    code = """
import torch
from lowbit.devices import simulated
try:
    simulated.enable()
except RuntimeError as error:
    print(error, torch._C._get_privateuse1_backend_name(), simulated.enabled())
"""
    told = python(code, LOWBIT_CACHE=str(tmp_path), PATH="", CXX="")
    assert "needs a C++ compiler once" in told and told.strip().endswith("privateuseone False")
