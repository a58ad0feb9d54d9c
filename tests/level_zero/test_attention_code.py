# SPDX-License-Identifier: Apache-2.0
"""What Intel's compiler makes of attention and decode for dg2 and pvc: no register in memory, no call."""

from __future__ import annotations

from pathlib import Path

import ocloc
import pytest
from modules import specialised

from lowbit import _C

pytestmark = pytest.mark.skipif(bool(ocloc.missing()), reason=ocloc.missing())
KERNELS = {
    "attention_forward": {"forward_64", "forward_128", "forward_256"},
    "attention_backward": {f"{stays}_{columns}" for stays in ("keys", "queries") for columns in (64, 128, 256)},
    "attention_rows": {"row_statistics", "sink_gradient", "sums_start", "sums_add"},
    "attention_prepare": {"write_table", "make_classes"},
    "decode": {"decode_64", "decode_128", "decode_256"},
    "kv_codes": {"decode_combine", "kv_quantize", "kv_dequantize"},
}


LARGE = "-ze-opt-large-register-file"


@pytest.mark.parametrize("device", ocloc.LANES)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_in_memory_that_could_be_in_registers(name: str, device: str, tmp_path: Path) -> None:
    compiled = ocloc.compile_module(_C.level_zero.module(name), device, tmp_path)
    spilled = [line for line in compiled.spilled if name != "attention_backward" or "_256 " not in line]  # they are built with LARGE
    assert compiled.kernels.keys() == KERNELS[name] and not spilled
    for kernel, code in compiled.kernels.items():
        assert not code.count(r"ss\[") and not code.count(r"\bcall"), kernel


@pytest.mark.parametrize("device", ocloc.LANES)
def test_the_backward_of_256_columns_has_its_registers(device: str, tmp_path: Path) -> None:
    compiled = ocloc.compile_module(_C.level_zero.module("attention_backward"), device, tmp_path, LARGE)
    assert not compiled.spilled and not any(code.count(r"ss\[") for code in compiled.kernels.values())


@pytest.mark.parametrize("is_float16", [0, 1])
@pytest.mark.parametrize("device", ocloc.LANES)
def test_code_of_dpas(device: str, is_float16: int, tmp_path: Path) -> None:
    lanes, keys = ocloc.LANES[device], 32
    module = specialised(f"attention_forward_dpas{lanes}", [is_float16])
    compiled = ocloc.compile_module(module, device, tmp_path, LARGE)
    assert compiled.kernels.keys() == KERNELS["attention_forward"] and not compiled.spilled
    for name, code in compiled.kernels.items():
        columns = int(name.removeprefix("forward_"))
        rows = min(8, 64 * lanes // columns)
        products = keys // lanes + keys // 16 * columns // lanes  # of 16 columns of queries, in a loop; of 32 values
        assert code.count(rf"dpas\.8x{rows} ") == code.count("dpas") == products, name
        assert code.count("hf" if is_float16 else "bf") and not code.count(r"ss\[") and not code.count(r"\bcall"), name
