# SPDX-License-Identifier: Apache-2.0
"""What Intel's compiler makes of the steps of optimizers, built as the runtime asks for it: no register in memory."""

from __future__ import annotations

from pathlib import Path

import ocloc
import pytest

from lowbit import _C

pytestmark = pytest.mark.skipif(bool(ocloc.missing()), reason=ocloc.missing())
MODULES = [name for name in _C.level_zero.modules() if name.startswith("optim_")]


def options_of(module: str, device: str) -> str:
    """As csrc/level_zero/optim/rows.cpp has it built."""
    large = ocloc.LANES[device] == 8 and module.startswith("optim_step")
    return "-cl-fp32-correctly-rounded-divide-sqrt" + " -ze-opt-large-register-file" * large


@pytest.mark.parametrize("device", ocloc.LANES)
@pytest.mark.parametrize("module", MODULES)
def test_no_register_of_a_step_goes_to_memory(module: str, device: str, tmp_path: Path) -> None:
    compiled = ocloc.compile_module(_C.level_zero.module(module), device, tmp_path, options_of(module, device))
    assert compiled.kernels and not compiled.spilled
    for kernel in compiled.kernels.values():
        assert not kernel.count(r"ss\[") and not kernel.count(r"\bcall")
