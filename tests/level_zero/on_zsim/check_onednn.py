# SPDX-License-Identifier: Apache-2.0
"""linear of a decoded weight by a stand-in for oneDNN, on zsim: within the budget of the CPU's rows and one rounding more
of the weight; the bits of the CPU where arithmetic is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowbit
from lowbit import _C, testing
from lowbit.devices import level_zero
from lowbit.testing import LinearCase, assert_within, cached_data

level_zero.enable()
DEVICE = "lowbit_ze:0"
FLOATS = [
    LinearCase(m, n, k, dtype, format, group_size, mapping, "float", *post_ops)
    for m, n, k, dtype, format, group_size, mapping, *post_ops in (
        (1, 37, 150, "bfloat16", "int4", 32, "asymmetric", "float32", "silu", True, True),
        (70, 37, 150, "bfloat16", "int4", 32, "asymmetric", None, "none", False, False),
        (5, 16, 64, "float16", "int8", 0, "symmetric", None, "none", False, False),
        (33, 33, 96, "float16", "nf4", 64, "symmetric", "dtype of x", "gelu", False, True),
        (9, 20, 70, "bfloat16", "fp8_e4m3", 0, "symmetric", "float32", "none", False, False),
        (17, 48, 130, "bfloat16", "bfloat16", 0, "symmetric", None, "relu", True, False),
        (8, 17, 300, "float16", "int3", 128, "symmetric", None, "none", False, False),
        (3, 20, 100, "float32", "float32", 0, "symmetric", "float32", "gelu_tanh", True, True),
        (4, 20, 100, "float32", "float16", 0, "symmetric", None, "none", False, False),
        (6, 21, 80, "float32", "int6", 64, "asymmetric", None, "none", False, False),
    )
]
CODES = [
    LinearCase(m, n, k, dtype, format, 0, "symmetric", x_format, *post_ops)
    for m, n, k, dtype, format, x_format, *post_ops in (
        (26, 37, 150, "bfloat16", "int8", "int8_row", "float32", "silu", True, True),
        (3, 16, 64, "float32", "int8", "int8_row", None, "none", False, False),
        (70, 33, 99, "float16", "int8", "int8_row_asymmetric", "dtype of x", "none", False, False),
        (9, 20, 70, "float32", "int4", "int8_row", None, "none", False, False),
        (2, 20, 300, "bfloat16", "int3", "int8_row_asymmetric", None, "gelu", False, True),
    )
]


def on_gpu(case: LinearCase, row: str) -> torch.Tensor:
    data = cached_data(case)
    there = [None if tensor is None else tensor.to(DEVICE) for tensor in (data.x, data.packed, data.bias, data.mul, data.add)]
    x, packed, bias, mul, add = there
    with lowbit.force_kernel(row):
        y = torch.ops.lowbit.linear(x, packed, *case.op_args, bias, _C.ACTIVATIONS[case.activation], mul, add)
    assert _C.last_kernel("linear") == row
    return y.cpu()


@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_float_activations(case: LinearCase) -> None:
    data = cached_data(case)
    exact = case.dtype == "float32" or (case.group_size == 0 and case.format in ("int8", "bfloat16", "fp8_e4m3"))
    eps = torch.finfo(getattr(torch, case.dtype)).eps / 2
    weight = torch.ops.lowbit.dequantize(data.packed, *case.op_args[:5]).double()
    rounding = 0 if exact else 1.2 * eps * (data.x.double().abs() @ weight.abs().T) * (1 if data.mul is None else data.mul.double().abs())
    assert_within(on_gpu(case, "linear_decoded_onednn_level_zero"), data.wanted, data.allowed + rounding, str(case))


@pytest.mark.parametrize("case", CODES, ids=str)
def test_codes(case: LinearCase) -> None:
    data = cached_data(case)
    y = on_gpu(case, "linear_codes_onednn_level_zero")
    assert_within(y, data.wanted, data.allowed, str(case))
    if case.format == "int8" and case.activation == "none" and case.x_format == "int8_row":
        assert torch.equal(y, testing.run_linear(case, data, "linear_int8_int8_scalar"))


def test_our_own_rows_come_first_and_a_failing_product_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CODES[1]
    wanted = on_gpu(case, "linear_codes_onednn_level_zero")
    monkeypatch.setenv("ONEDNN_STAND_IN", "execute")
    with pytest.raises(RuntimeError, match="oneDNN: dnnl_primitive_execute failed: out of memory"):
        on_gpu(case, "linear_codes_onednn_level_zero")
    x, packed = (tensor.to(DEVICE) for tensor in (cached_data(case).x, cached_data(case).packed))
    own = torch.ops.lowbit.linear(x, packed, *case.op_args, None, 0, None, None)
    assert _C.last_kernel("linear") == "linear_int8_int8_level_zero" and torch.equal(own.cpu(), wanted)
    monkeypatch.delenv("ONEDNN_STAND_IN")
    assert torch.equal(on_gpu(case, "linear_codes_onednn_level_zero"), wanted)


def test_sizes_take_turns_and_no_memory_stays() -> None:
    cases = [replace(FLOATS[1], m=m) for m in (1, 40, 2)]
    first = [on_gpu(case, "linear_decoded_onednn_level_zero") for case in cases]
    before = torch.lowbit_ze.memory_allocated()
    again = [on_gpu(case, "linear_decoded_onednn_level_zero") for case in cases]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and torch.lowbit_ze.memory_allocated() == before
