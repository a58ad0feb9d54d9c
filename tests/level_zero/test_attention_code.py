# SPDX-License-Identifier: Apache-2.0
"""The code of Intel's compiler for attention and decode: no register in memory, no call, the dpas that the products need."""

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

SPILLED = {
    ("dg2", "forward_64"): 2100, ("dg2", "forward_128"): 2100, ("dg2", "forward_256"): 4100, ("ptl", "forward_128"): 2600,
    ("dg2", "keys_64"): 3500, ("pvc", "keys_128"): 3800,
}  # fmt: skip
"""Bytes of a thread at most, by compilers after 22.43 (which leaves nothing): of dpas and of the backward, before and behind the
loops over products."""


def check(kernels: dict[str, ocloc.Kernel], device: str, allowed: bool) -> None:
    for name, kernel in kernels.items():
        most = SPILLED.get((device, name), 0) if allowed else 0
        assert kernel.spilled_bytes <= most and not kernel.private_bytes and not kernel.count(r"\bcall"), name


@pytest.mark.parametrize("device", ocloc.lanes())
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_in_memory_that_could_be_in_registers(name: str, device: str, tmp_path: Path) -> None:
    kernels = ocloc.compile_module(_C.level_zero.module(name), device, tmp_path)
    assert kernels.keys() == KERNELS[name]
    check(kernels, device, allowed=ocloc.is_new() and name == "attention_backward")


@pytest.mark.parametrize("is_float16", [0, 1])
@pytest.mark.parametrize("device", ocloc.lanes())
def test_code_of_dpas(device: str, is_float16: int, tmp_path: Path) -> None:
    lanes, keys = ocloc.lanes()[device], 32
    kernels = ocloc.compile_module(specialised(f"attention_forward_dpas{lanes}", [is_float16]), device, tmp_path)
    assert kernels.keys() == KERNELS["attention_forward"]
    check(kernels, device, allowed=ocloc.is_new())
    for name, kernel in kernels.items():
        columns = int(name.removeprefix("forward_"))
        rows = min(8, 64 * lanes // columns)
        products = keys // lanes + keys // 16 * columns // lanes  # of 16 columns of queries, in a loop; of 32 values
        assert kernel.count(ocloc.PRODUCT) == products and not kernel.count(rf"dpas(?!\.8x{rows} )"), name
        assert kernel.count("hf" if is_float16 else "bf")
