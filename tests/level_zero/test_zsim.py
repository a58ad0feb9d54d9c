# SPDX-License-Identifier: Apache-2.0
"""The rows for Intel GPUs on a machine without one: their modules run by OpenCL on the CPU, through our client of Level Zero.

The modules are those that a GPU gets; what dpas does is linked to them (zsim/dpas.cl). What this cannot see: speed, a real
driver, what dpas does with numbers on silicon.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "zsim"
DEVICES = {"": "", "pvc": "dpas_", "dg2": "dpas_"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("check_*.py")))
def test_checks(file: str, device: str, zsim: dict[str, str]) -> None:
    environment = os.environ | zsim | {"LOWBIT_ZSIM_DEVICE": device}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(HERE / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) > 0, done.stdout[-8000:] + done.stderr[-4000:]


LINEAR = """
import torch
from lowbit import _C, testing
from lowbit.devices import simulated
simulated.enable()
case = testing.LinearCase(1, 16, 64, "float32", "int8", 0, "symmetric", "int8_row", None)
data = testing.cached_data(case)
for row in ("linear_int8_int8_dpas_level_zero_sim", "linear_int8_int8_level_zero_sim"):
    _C.force_kernel(row)
    try:
        y = torch.ops.lowbit.linear(data.x.to("lowbit_sim:1"), data.packed.to("lowbit_sim:1"), *case.op_args, None, 0, None, None)
        print(row, y.shape)
    except Exception as error:
        print(row, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, "the device has no dpas"),
        ({"LOWBIT_ZSIM_FAIL": "zeModuleCreate:70000004"}, "building linear_activations for OpenCL on a CPU\nzsim was told to fail"),
        ({"LOWBIT_ZSIM_FAIL": "zeCommandListAppendLaunchKernel:70000001"}, "code_rows of linear_activations, 1 groups of 256 threads failed: ZE_RESULT_ERROR_DEVICE_LOST (0x70000001)"),
    ],
)
def test_what_fails_is_told(environment: dict[str, str], words: str, zsim: dict[str, str], python: Callable[..., str]) -> None:
    assert words in python(LINEAR, **zsim, **environment)


ROWS = "from lowbit import _C; print([row['name'] for row in _C.kernels('linear') if 'level_zero' in row['name']])"


def test_a_machine_without_a_loader_has_no_rows_and_says_nothing(tmp_path: Path, python: Callable[..., str]) -> None:
    assert python(ROWS, LOWBIT_LEVEL_ZERO_PATH=str(tmp_path)).strip() == "[]"


def test_a_loader_without_a_driver_has_no_rows_and_says_nothing(zsim: dict[str, str], python: Callable[..., str]) -> None:
    assert python(ROWS, **zsim, LOWBIT_ZSIM_FAIL="zeInit:78000001").strip() == "[]"
    assert "linear_int4_level_zero_sim" in python(ROWS, **zsim)
