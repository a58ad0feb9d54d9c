# SPDX-License-Identifier: Apache-2.0
"""Intel's own driver without a GPU, as it is where it writes down what it would do (AUB): it builds our modules for dg2 and pvc,
links mods to them, and takes what it built from our cache. It computes nothing: numbers are zsim's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.walks,
    pytest.mark.skipif(not find_library("ze_intel_gpu"), reason="no libze_intel_gpu.so.1 (apt install intel-opencl-icd)"),
    pytest.mark.skipif(not find_library("ze_loader"), reason="no libze_loader.so.1 (apt install libze1)"),
]
SHAPES = {"dg2": "2x4x16", "pvc": "8x1x8"}
PROGRAM = """
import torch, lowbit
from lowbit import _C
from lowbit.devices import level_zero
level_zero.enable()
layer = torch.nn.Sequential(torch.nn.Linear(128, 64)).to("lowbit_ze")
lowbit.quantize_(layer, lowbit.int4_weight_only(group_size=32))
q = torch.randn(1, 2, 40, 64, device="lowbit_ze")
param = torch.nn.Parameter(torch.randn(1000, device="lowbit_ze"))
param.grad = torch.ones_like(param)
with torch.no_grad():
    for rows in (1, 8, 70):
        layer(torch.randn(rows, 128, device="lowbit_ze"))
    lowbit.flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
    lowbit.flex_attention(q, q, q)
lowbit.optim.AdamW8bit([param], min_8bit_size=0).step()
print(_C.last_kernel("linear"), _C.last_kernel("attention_forward"), _C.last_kernel("optim_step"))
"""


@pytest.mark.parametrize("gpu", SHAPES)
def test_modules_are_built_linked_and_kept(gpu: str, tmp_path: Path) -> None:
    on = {"NEOReadDebugKeys": "1", "SetCommandStreamReceiver": "1", "ProductFamilyOverride": gpu, "HardwareInfoOverride": SHAPES[gpu]}
    environment = os.environ | on | {"LOWBIT_CACHE_DIR": str(tmp_path / "cache")}
    kept: list[dict[str, tuple[int, int]]] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        for written in tmp_path.glob("*.aub"):  # 300 MB
            written.unlink()
        linear = "linear_int4_dpas_level_zero" if gpu == "pvc" else "linear_int4_level_zero"  # dg2 has no PCI id there
        assert done.stdout == f"{linear} attention_forward_tiles_level_zero optim_step_dynamic8_level_zero\n", done.stdout + done.stderr
        files = (tmp_path / "cache" / "level_zero").glob("*.native")
        kept.append({path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files})
    assert len(kept[0]) >= 6 and kept[0] == kept[1]  # nothing was built again
