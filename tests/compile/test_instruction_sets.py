# SPDX-License-Identifier: Apache-2.0
"""Files whose outcome depends on torch's kernels, run as on older processors: lowbit, ATen and oneDNN are held to the same
instruction set, in a process of its own. A run of the suite takes one of the variants, each commit another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit import testing

TESTS = Path(__file__).parents[1]
FILES = (
    "attention/test_sdpa.py", "compile/test_compile_blocks.py", "compile/test_max_autotune.py", "compile/test_options.py",
    "models/test_fuse.py", "models/test_transformers.py", "quant/test_quantize_model.py", "training/test_int8.py",
)  # fmt: skip
HELD = {
    "avx2": {"LOWBIT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"LOWBIT_ISA": "avx512", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
AVAILABLE = {str(row["backend"]) for row in testing.rows("linear") if row["available"]}


@pytest.mark.parametrize("isa", [isa for isa in HELD if isa in AVAILABLE])
@pytest.mark.parametrize("file", FILES)
def test_a_file_passes_as_on_an_older_processor(file: str, isa: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS / file)]
    done = subprocess.run(command, env=os.environ | HELD[isa], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(f'{k}={v}' for k, v in HELD[isa].items())} {' '.join(command)}\n{done.stdout[-8000:]}"
