# SPDX-License-Identifier: Apache-2.0
"""The code of Intel's compiler for the steps of optimizers, as the runtime has them built: no register in memory."""

from __future__ import annotations

from pathlib import Path

import ocloc
import pytest
from modules import ROOT

from lowbit import _C

pytestmark = pytest.mark.skipif(bool(ocloc.missing()), reason=ocloc.missing())
MODULES = sorted(path.name.removesuffix(".spirv.cpp") for path in (ROOT / "csrc" / "level_zero" / "optim").glob("*.spirv.cpp"))


@pytest.mark.parametrize("device", ocloc.lanes())
@pytest.mark.parametrize("module", MODULES)
def test_no_register_of_a_step_goes_to_memory(module: str, device: str, tmp_path: Path) -> None:
    kernels = ocloc.compile_module(_C.level_zero.module(module), device, tmp_path, "-cl-fp32-correctly-rounded-divide-sqrt")
    assert kernels
    for name, kernel in kernels.items():
        assert not kernel.spilled_bytes and not kernel.private_bytes and not kernel.count(r"\bcall"), name
