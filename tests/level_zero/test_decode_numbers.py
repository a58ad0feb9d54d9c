# SPDX-License-Identifier: Apache-2.0
"""The kernels of decode and its codes for Intel GPUs on a CPU, by OpenCL: within the CPU's budgets of float64, and the
CPU's codes."""

from __future__ import annotations

import opencl
import pytest
import torch
from tests.ops import test_decode as on_the_cpu

from lowbit.testing import assert_within

pytestmark = pytest.mark.skipif(bool(opencl.missing()), reason=opencl.missing())


@pytest.mark.parametrize("kind", on_the_cpu.KINDS)
def test_decode_is_within_budget_of_float64(kind: str) -> None:
    from decode_on_opencl import decode

    for case in on_the_cpu.cases(kind):
        data = on_the_cpu.make(case)
        out, lse = decode(data.q, data.out.shape[-1], data.call)
        assert_within(out, data.out, data.allowed, str(case))
        assert_within(lse, data.lse, data.allowed_lse, f"lse of {case}")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("columns", [1, 31, 64, 96, 128, 512])
def test_codes_are_those_of_the_cpu(kind: str, columns: int) -> None:
    from decode_on_opencl import convert

    x = torch.randn(2, 3, 5, columns) * torch.logspace(-3, 3, 5)[:, None]
    x[0, 0, 0], x[1, 2, 3, 0] = 0, torch.inf
    wanted, wanted_scale = on_the_cpu.quantized(x, kind, False)
    codes, scale = torch.full_like(wanted, 77), torch.full_like(wanted_scale, 7)
    convert("kv_quantize", x, codes, scale, False)
    assert torch.equal(codes, wanted) and torch.equal(scale.nan_to_num(-1), wanted_scale.nan_to_num(-1))
    back, wanted_back = torch.full((2, *x.shape), 7.0)
    convert("kv_dequantize", back, codes, scale, False)
    torch.ops.lowbit.kv_dequantize_(wanted, wanted_scale, wanted_back, False)
    assert torch.equal(back.nan_to_num(-1), wanted_back.nan_to_num(-1))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("columns", [31, 80, 128])
def test_rotated_codes_are_near_those_of_the_cpu(kind: str, columns: int) -> None:
    """The sums of a rotation have another order: a code on the edge may be its neighbour."""
    from decode_on_opencl import convert

    x = torch.randn(2, 3, 5, columns)
    wanted, wanted_scale = on_the_cpu.quantized(x, kind, True)
    codes, scale = torch.full_like(wanted, 77), torch.full_like(wanted_scale, 7)
    convert("kv_quantize", x, codes, scale, True)
    assert (codes != wanted).sum() <= 2
    torch.testing.assert_close(scale, wanted_scale, rtol=2.0**-10, atol=0)
    back = torch.full_like(x, 7.0)
    convert("kv_dequantize", back, codes, scale, True)
    assert ((back - x).abs() <= scale.float().abs().amax() * columns**0.5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_of_16_bit_floats(dtype: torch.dtype) -> None:
    from decode_on_opencl import convert

    x = torch.randn(1, 2, 9, 64).to(dtype)
    wanted, wanted_scale = on_the_cpu.quantized(x, "int8", False)
    codes, scale, back, wanted_back = torch.full_like(wanted, 77), torch.full_like(wanted_scale, 7), torch.empty_like(x), torch.empty_like(x)
    convert("kv_quantize", x, codes, scale, False)
    convert("kv_dequantize", back, codes, scale, False)
    torch.ops.lowbit.kv_dequantize_(wanted, wanted_scale, wanted_back, False)
    assert torch.equal(codes, wanted) and torch.equal(scale, wanted_scale) and torch.equal(back, wanted_back)
