# SPDX-License-Identifier: Apache-2.0
"""Registration with torch: what happens where the C shims of torch are missing, or another copy of lowbit came first."""

from __future__ import annotations

import re
from collections.abc import Callable

from lowbit import _C

# Loads the extension under its name before the package, and changes what it answers.
PATCHED = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("lowbit._C", sys.argv[1])
sys.modules["lowbit._C"] = _C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
"""


def test_a_torch_without_the_shims_is_refused_with_what_it_lacks(python: Callable[..., str]) -> None:
    code = """
_C.register_torch = lambda: [
    {"op": f"lowbit::{name}", "how": "", "reason": "this torch has no torch_library_impl"}
    for name in ("linear", "decode")
]
try:
    import lowbit
except ImportError as error:
    print(error)
"""
    out = python(PATCHED + code, _C.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out.startswith("lowbit needs PyTorch 2.10 or later, got ") and "this torch has no torch_library_impl" in out


def test_registering_again_from_a_reloaded_package_changes_nothing(python: Callable[..., str]) -> None:
    code = """
import sys, torch, warnings
warnings.simplefilter("error")
import lowbit
first = torch.ops.lowbit.linear.default
for name in [name for name in sys.modules if name == "lowbit" or name.startswith("lowbit.") and name != "lowbit._C"]:
    del sys.modules[name]
import lowbit
from lowbit import _C, testing
case = testing.LinearCase(1, 5, 7)
testing.run_linear(case, testing.make_data(case))
with torch._subclasses.FakeTensorMode() as mode:
    x = torch.empty(1, 7)
    weight = torch.empty(_C.packed_shape(0, 5, 7, 3, 0, False), dtype=torch.uint8)
    assert torch.ops.lowbit.linear(x, weight, 5, 7, 3, 0, False, 0).shape == (1, 5)
print(lowbit.info()["torch.ops.lowbit"])
"""
    assert re.fullmatch(r"[0-9]+ ops, (c\+\+ shims|already registered)", python(code).strip())
