# SPDX-License-Identifier: Apache-2.0
"""linear on zsim, on a device without dpas, on one of Xe-HPC and on one of Xe-HPG, whose dpas is shuffles in OpenCL C (dpas.cl).

The modules are those that a GPU gets. It cannot see the numbers of dpas on silicon. Of attention dpas has the forward of
16 bits alone; test_torch_device.py runs the other rows, which would be the same modules, linked to dpas.cl in vain.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from nested import Check, Run, checks

HERE = Path(__file__).parent
PCI_IDS = {"without dpas": "", "pvc": "0x0bd5", "dg2": "0x5690"}


@pytest.fixture(scope="session")
def dpas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The products of dpas as a module that zsim links to every other."""
    tools = ("clang-15", "llvm-spirv-15")
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        pytest.skip(f"{' and '.join(missing)} not found, to make a module of dpas.cl")
    code, module = (tmp_path_factory.mktemp("dpas") / name for name in ("dpas.bc", "dpas.spv"))
    flags = ["--target=spir64", "-x", "cl", "-cl-std=CL2.0", "-Xclang", "-finclude-default-header", "-ffp-contract=off", "-O2", "-c", "-emit-llvm"]
    subprocess.run(["clang-15", *flags, str(HERE / "dpas.cl"), "-o", str(code)], check=True)
    subprocess.run(["llvm-spirv-15", "--spirv-max-version=1.2", "--spirv-ext=+SPV_INTEL_subgroups", str(code), "-o", str(module)], check=True)
    return str(module)


@pytest.mark.core
@pytest.mark.parametrize(
    "check, device",
    [
        pytest.param(check, device, id=f"{check}-{device}")
        for name, devices in {"linear": PCI_IDS, "encoder": ("without dpas", "pvc"), "attention": ("pvc",)}.items()
        for check in checks(HERE / f"on_zsim/check_{name}.py")
        if name != "attention" or check.function == "test_attention_is_within_budget_of_float64"
        for device in devices
    ],
)
def test_checks(check: Check, device: str, zsim: dict[str, str], passes: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    has_dpas = {"ZSIM_DEVICE": PCI_IDS[device], "ZSIM_LINK": request.getfixturevalue("dpas")} if PCI_IDS[device] else {}
    done = passes(check, **zsim, **has_dpas)
    assert "ze_validation" not in str(done).lower() and "zsim:" not in done.errors, str(done)
