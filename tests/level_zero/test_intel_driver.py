# SPDX-License-Identifier: Apache-2.0
"""Intel's own driver without a GPU, as it is where it writes down what it would do (AUB): it builds our modules for
dg2, pvc and what else it knows, links mods to them, and takes what it built from our cache. It computes nothing:
numbers are zsim's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import ocloc
import pytest

pytestmark = [
    pytest.mark.skipif(not find_library("ze_intel_gpu"), reason="no libze_intel_gpu.so.1 (apt install intel-opencl-icd)"),
    pytest.mark.skipif(not find_library("ze_loader"), reason="no libze_loader.so.1 (apt install libze1)"),
]
SHAPES = {"dg2": "2x4x16", "pvc": "8x1x8", "bmg": "4x5x8", "ptl": "1x4x8"}
GPUS = [gpu for gpu in SHAPES if gpu in ("dg2", "pvc") or gpu in ocloc.lanes()]
FLEX = """
import torch, lowbit
def flex(*args, then=lambda out: None, **how):
    try:
        then(lowbit.flex_attention(*args, **how))
    except RuntimeError as error:  # nothing is computed there: what a kernel would have noted is what was in memory
        assert "a kernel did not run" in str(error)
"""
PROGRAM = f"""{FLEX}
from lowbit import _C
from lowbit.devices import level_zero
level_zero.enable()
layer = torch.nn.Sequential(torch.nn.Linear(128, 64))
lowbit.quantize_(layer, lowbit.int4_weight_only(group_size=32))  # here: nothing is computed there, and codes are checked
layer.to("lowbit_ze")
q = torch.randn(1, 2, 40, 64, device="lowbit_ze")
param = torch.nn.Parameter(torch.randn(1000, device="lowbit_ze"))
param.grad = torch.ones_like(param)
with torch.no_grad():
    for rows in (1, 8, 70):
        layer(torch.randn(rows, 128, device="lowbit_ze"))
    flex(q, q, q)
    print(_C.last_kernel("attention_forward"))
    half = q.to(torch.bfloat16)
    flex(half, half, half, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
    flex(half, half, half)
lowbit.optim.AdamW8bit([param], min_8bit_size=0).step()
print(_C.last_kernel("linear"), _C.last_kernel("attention_forward"), _C.last_kernel("optim_step"))
"""


SCORE_MODS = f"""{FLEX}
from lowbit.devices import level_zero
level_zero.enable()
q = torch.randn(1, 2, 8, 16, device="lowbit_ze")
table, slopes, words = torch.randn(2, 40, device="lowbit_ze"), torch.randn(2, device="lowbit_ze").to(torch.float16), torch.arange(8, device="lowbit_ze") // 3
mods = [  # two of many terms: linking one takes the compiler 4 to 8 s, with more registers twice that, whatever is in it
    lambda s, b, h, i, j: s + table[h, i - j + 20] + (j - i) * 0.5 ** (h + 1),
    lambda s, b, h, i, j: torch.where(i >= j, torch.where(words[i] == words[j], 20 * torch.tanh(s * slopes[h].float() / 20), s - 5), -torch.inf)
    + torch.clamp(s, -1, 1) + torch.log1p((i - j).abs().float()) + torch.maximum(s / (1 + torch.exp(-s)), torch.erf(s))
    + torch.sqrt(j.float()) + ((i // 3) % 5 - (j & 7)).float().sin() + (b == 0).float(),
]
with torch.no_grad():
    for mod in mods:
        flex(q, q, q, score_mod=mod)
table.requires_grad_()
flex(q, q, q, score_mod=mods[0], then=lambda out: out.sum().backward())
"""

def run(program: str, gpu: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process whose Intel driver believes in this GPU."""
    keys = {"SetCommandStreamReceiver": "1", "ProductFamilyOverride": gpu, "HardwareInfoOverride": SHAPES[gpu]}
    # Of drivers after 25.05, whose own way to write (AubStream) is not in their packages.
    later = keys | {"UseAubStream": "0", "UseBindlessMode": "0", "UseExternalAllocatorForSshAndDsh": "0"}
    on = {"NEOReadDebugKeys": "1"} | keys | {f"NEO_{name}": value for name, value in later.items()}
    environment = os.environ | on | {"LOWBIT_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    for written in folder.glob("*.aub"):  # 300 MB
        written.unlink()
    return done


@pytest.mark.parametrize("gpu", GPUS)
def test_modules_are_built_linked_and_kept(gpu: str, tmp_path: Path) -> None:
    kept: list[dict[str, tuple[int, int]]] = []
    for _ in range(2):
        done = run(PROGRAM, gpu, tmp_path)
        rows = "linear_int4_dpas_level_zero attention_forward_dpas_level_zero optim_step_dynamic8_level_zero"
        if gpu == "dg2" and "_dpas_" not in done.stdout:  # it has no PCI id there, and 22.43 does not say that it has dpas
            rows = "linear_int4_level_zero attention_forward_tiles_level_zero optim_step_dynamic8_level_zero"
        assert done.stdout == f"attention_forward_tiles_level_zero\n{rows}\n", done.stdout + done.stderr
        files = (tmp_path / "cache" / "level_zero").glob("*.native")
        kept.append({path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files})
    assert len(kept[0]) >= 6 and kept[0] == kept[1]  # nothing was built again


@pytest.mark.parametrize("gpu", GPUS)
def test_score_programs_are_linked(gpu: str, tmp_path: Path) -> None:
    done = run(SCORE_MODS, gpu, tmp_path)
    linked = [path.name.split("-")[0] for path in (tmp_path / "cache" / "level_zero").glob("*.native")]
    times = (2, 3, 4)  # more than 2: with more registers, too
    assert done.returncode == 0 and linked.count("attention_forward_mods") in times, done.stdout + done.stderr
    if gpu in ("dg2", "pvc"):  # the others may find noted faults in memory before they come to it
        assert linked.count("attention_captured") == 1  # the pass that adds up the gradient of what is captured
