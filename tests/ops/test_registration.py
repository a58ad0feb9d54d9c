# SPDX-License-Identifier: Apache-2.0
"""Registration with torch: what happens where the C shims of torch are missing, or another copy of lowbit came first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowbit import _C

# Loads the extension under its name before the package, and changes what it answers.
PATCHED = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("lowbit._C", sys.argv[1])
sys.modules["lowbit._C"] = _C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
"""

CHECK = """
import lowbit
from lowbit import testing
for case in testing.linear_cases(1)[::9]:
    data = testing.make_data(case)
    testing.assert_within(testing.run_linear(case, data), data.wanted, data.allowed, str(case))
try:
    torch.ops.lowbit.linear(torch.ones(1, 5), torch.zeros(1, 7, dtype=torch.uint8), 3, 5, 3, 0, False, 0)
except ValueError as error:
    print(str(error).splitlines()[0])
print(lowbit.info()["torch.ops.lowbit.linear"])
print(lowbit.info()["torch.ops.lowbit.dequantize"])
"""


def test_without_the_shims_python_registers_the_same_ops(python: Callable[..., str]) -> None:
    missing = """
_C.register_torch = lambda: [
    {"op": f"lowbit::{name}", "how": "", "reason": "torch_library_impl is missing (test)"} for name in ("linear", "dequantize")
]
"""
    out = python(PATCHED + missing + CHECK, _C.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert out[0].startswith("linear: weight must have the packed shape")
    assert out[1:] == ["torch.library (torch_library_impl is missing (test))"] * 2


def test_python_fallback_compiles_and_has_gradients(python: Callable[..., str]) -> None:
    code = """
_C.register_torch = lambda: []
import lowbit
from lowbit import testing
case = testing.LinearCase(4, 20, 70, format="int4", group_size=32, x_format="int8_group", bias="float32")
data = testing.make_data(case)
f = lambda x: lowbit.linear(x, data.packed, case.op_args, data.bias)
torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(data.x), f(data.x))
x = data.x.clone().requires_grad_()
f(x).sum().backward()
print(x.grad.shape)
"""
    assert "[4, 70]" in python(PATCHED + code, _C.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_python_fallback_of_attention_and_the_cache_gives_the_same_bits(python: Callable[..., str]) -> None:
    code = """
import hashlib, lowbit
torch.manual_seed(0)
q, k, v = (torch.randn(2, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2))
bias = torch.randn(4, 40, requires_grad=True)
mask = lowbit.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, BLOCK_SIZE=16)
out = lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mask, enable_gqa=True, dropout_p=0.1)
results = [out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]
float_mask = torch.randn(1, 4, 1, 40, requires_grad=True)
out = lowbit.scaled_dot_product_attention(q, k, v, float_mask, enable_gqa=True)
results += [out, *torch.autograd.grad(out.square().sum(), (q, k, v, float_mask))]
for format in ("int8", "int4"):
    cache = lowbit.QuantizedKVCache(format)
    cache.append(0, k, v)
    results += [cache.attend(0, q[:, :, :3]), cache.layer(0).keys()]
print(hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in results)).hexdigest())
print(lowbit.info()["torch.ops.lowbit.attention_forward"])
"""
    wanted, how = python(PATCHED + code, _C.__file__).splitlines()
    found, fallback = python(PATCHED + "_C.register_torch = lambda: []" + code, _C.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert found == wanted
    assert how == "c++ shims" and fallback.startswith("torch.library (")


@pytest.mark.parametrize("shims", [True, False])
def test_registering_again_from_a_reloaded_package_changes_nothing(python: Callable[..., str], shims: bool) -> None:
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
    weight = torch.empty(1, _C.panel_bytes(3, 7, 0, False), dtype=torch.uint8)
    assert torch.ops.lowbit.linear(x, weight, 5, 7, 3, 0, False, 0).shape == (1, 5)
print(lowbit.info()["torch.ops.lowbit.linear"])
"""
    if shims:
        assert python(code).strip() in ("c++ shims", "already registered")
    else:
        code = PATCHED + "_C.register_torch = lambda: []" + code
        assert python(code, _C.__file__, TORCH_DEVICE_BACKEND_AUTOLOAD="0").startswith("torch.library (")
