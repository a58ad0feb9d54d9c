# SPDX-License-Identifier: Apache-2.0
"""Our client, Debian's loader and zsim over PoCL: what needs no functions of sub-groups, by free software alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nested import Run

HERE = Path(__file__).parent
FILES = {  # what is left out multiplies: the activations of linear are brought in order by sub-groups
    "torch_device": (HERE / "on_zsim/check_torch_device.py", "not quantized"),
    "dequantize": (HERE.parent / "ops/test_linear.py", "dequantize"),
    "embedding": (HERE.parent / "ops/test_embedding.py", "decoded_weight or index_error"),
}


@pytest.mark.core
@pytest.mark.parametrize("name, fewest", [("torch_device", 14), ("dequantize", 1), ("embedding", 2)])  # 2 functions, each once
def test_checks(name: str, fewest: int, zsim_on_pocl: dict[str, str], nested: Callable[..., Run]) -> None:
    file, which = FILES[name]
    on_device = {} if name == "torch_device" else {"LOWBIT_TEST_DEVICE": "lowbit_ze:0"}
    done = nested("-s", file, "-k", which, share=6 if name == "embedding" else 1, **zsim_on_pocl, **on_device)
    assert done.code == 0 and done.passed >= fewest, str(done)
    assert "ze_validation" not in (done.said + done.errors).lower() and "zsim:" not in done.errors, str(done)
    if on_device:
        assert f"dequantize_{'rows' if name == 'embedding' else 'panels'}_level_zero" in done.said
