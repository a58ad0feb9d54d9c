# SPDX-License-Identifier: Apache-2.0
"""oneDNN's engine for Intel GPUs on zsim: our kernels run as on a GPU, oneDNN is a stand-in (onednn_stand_in.cpp).

What this cannot see: oneDNN's own kernels, which are machine code of a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from nested import Run

HERE = Path(__file__).parent
FUNCTIONS = re.findall(r'"(dnnl_\w+)"', (HERE.parents[1] / "csrc" / "onednn" / "api.hpp").read_text())


def stand_in(folder: Path, without: str = "") -> dict[str, str]:
    """The environment with the stand-in, where all other functions of oneDNN are there and do nothing."""
    text = (HERE / "onednn_stand_in.cpp").read_text()
    if without:
        text = text.replace(without, f"not_{without}")
    stubs = [name for name in FUNCTIONS if f" {name}(" not in text and name != without and not name.startswith("dnnl_graph")]
    (folder / "all.cpp").write_text(text + "".join(f"EXPORTED int {name}() {{ return 0; }}\n" for name in stubs))
    command = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", str(folder / "all.cpp"), "-o", str(folder / "libdnnl.so.3")]
    subprocess.run(command, check=True)
    return {"LOWBIT_ONEDNN_PATH": str(folder)}


def test_checks(zsim: dict[str, str], nested: Callable[..., Run], tmp_path: Path) -> None:
    done = nested(HERE / "on_zsim" / "check_onednn.py", share=1, **zsim, **stand_in(tmp_path))
    assert done.code == 0 and done.passed > 15, str(done)
    assert "ze_validation" not in str(done).lower() and "zsim:" not in done.errors, str(done)


REASONS = """
import os, sys
import torch
from lowbit import _C
from lowbit.devices import level_zero
level_zero.enable()
for m, told in enumerate(sys.argv[1:], start=70):
    os.environ["ONEDNN_STAND_IN"] = told
    rows = _C.explain_linear(m, 64, 128, _C.FORMATS["int4"], 32, False, _C.X_FORMATS["float"], "bfloat16", "lowbit_ze")
    assert next(row["name"] for row in rows if not row["reason"]) == "linear_int4_level_zero"
    print(next(row["reason"] for row in rows if row["name"] == "linear_decoded_onednn_level_zero"))
"""


def test_a_library_without_the_engine_is_a_reason_and_our_row_runs(zsim: dict[str, str], python: Callable[..., str], tmp_path: Path) -> None:
    said = python(REASONS, "", **zsim, **stand_in(tmp_path, without="dnnl_ze_interop_engine_create")).splitlines()
    assert said == [f"{tmp_path}/libdnnl.so.3 has no engine for Level Zero: wanted a build with ONEDNN_GPU_RUNTIME=ZE"]


def test_what_onednn_refuses_is_a_reason_and_our_row_runs(zsim: dict[str, str], python: Callable[..., str], tmp_path: Path) -> None:
    said = python(REASONS, "engine", "unimplemented", "reference", "", **zsim, **stand_in(tmp_path)).splitlines()
    assert said == [
        "oneDNN: dnnl_ze_interop_engine_create failed: status 2",
        "oneDNN has no implementation of this product for this GPU",
        "oneDNN has only its reference implementation of this product for this GPU, ocl:ref:any",
        "a better row fits",
    ]
