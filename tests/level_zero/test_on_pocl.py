# SPDX-License-Identifier: Apache-2.0
"""Our client, Debian's loader and zsim over PoCL: what needs no functions of sub-groups, by free software alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = {  # what is left out multiplies: the activations of linear are brought in order by sub-groups
    "torch_device": (HERE / "on_zsim/check_torch_device.py", "not quantized"),
    "dequantize": (HERE.parent / "ops/test_linear.py", "dequantize"),
    "embedding": (HERE.parent / "ops/test_embedding.py", "decoded_weight or index_error"),
}


@pytest.mark.parametrize("name, fewest", [("torch_device", 14), ("dequantize", 1), ("embedding", 10)])
def test_checks(name: str, fewest: int, zsim_on_pocl: dict[str, str]) -> None:
    file, which = FILES[name]
    every = "6" if name == "embedding" else "1"
    on_device = {} if name == "torch_device" else {"LOWBIT_TEST_DEVICE": "lowbit_ze:0", "LOWBIT_TEST_EVERY": every}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tb=short", str(file), "-k", which]
    done = subprocess.run(command, env=os.environ | zsim_on_pocl | on_device, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= fewest
    assert "ze_validation" not in (done.stdout + done.stderr).lower() and "zsim:" not in done.stderr, done.stderr
    if on_device:
        assert f"dequantize_{'rows' if name == 'embedding' else 'panels'}_level_zero" in done.stdout
