# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear for Intel GPUs on a CPU: within the CPU's budgets, and its bits where arithmetic is exact.

By OpenCL, with what dpas does written in OpenCL C (dpas.cl): the modules are those that a GPU gets. A unit compiles a
module for each kind of call in one to three seconds, so the kinds are few.
"""

from __future__ import annotations

import opencl
import pytest
import torch

from lowbit.testing import LinearCase, LinearData, assert_within, cached_data, make_data, run_linear

pytestmark = pytest.mark.skipif(bool(opencl.missing()), reason=opencl.missing())
UNITS = ("portable", "dpas16", "dpas8")
N, K = 37, 150  # neither fills its last panel or tile
KINDS = {
    (dtype, format, group_size, mapping, x_format): post_ops
    for dtype, format, group_size, mapping, x_format, *post_ops in (
        ("float32", "float32", 0, "symmetric", "float", "float32", "relu", True, False),
        ("bfloat16", "bfloat16", 0, "symmetric", "float", "dtype of x", "none", False, True),
        ("float16", "float16", 0, "symmetric", "float", "dtype of x", "silu", True, True),
        ("float32", "int4", 32, "asymmetric", "float", "float32", "gelu_tanh", True, True),
        ("bfloat16", "int8", 0, "symmetric", "float", None, "gelu", False, False),
        ("float16", "int7", 128, "symmetric", "float", None, "none", False, False),
        ("bfloat16", "nf4", 64, "symmetric", "float", None, "none", False, False),
        ("bfloat16", "fp4_e2m1", 16, "symmetric", "float", None, "none", False, True),
        ("bfloat16", "fp8_e4m3", 0, "symmetric", "float8_row", "float32", "none", False, False),
        ("float32", "int8", 0, "symmetric", "int8_row", None, "none", False, False),
        ("bfloat16", "int4", 32, "symmetric", "int8_group", "float32", "silu", True, False),
        ("float16", "int3", 0, "asymmetric", "int8_row_asymmetric", None, "none", False, False),
    )
}


def on_opencl(case: LinearCase, unit: str, data: LinearData | None = None) -> torch.Tensor:
    from linear_on_opencl import linear

    return linear(case, cached_data(case) if data is None else data, unit)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_every_kind_is_within_budget_of_the_float64_reference(kind: tuple[str, str, int, str, str], unit: str) -> None:
    for m in (1, 13, 70):  # the three kernels
        data = cached_data(case := LinearCase(m, N, K, *kind, *KINDS[kind]))
        assert_within(on_opencl(case, unit), data.wanted, data.allowed, f"{unit} {case}")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("m", [1, 13, 70])
def test_sums_of_codes_have_the_bits_of_the_cpu(m: int, unit: str) -> None:
    case = LinearCase(m, N, K, "float32", "int8", 0, "symmetric", "int8_row", None)
    wanted = run_linear(case, cached_data(case), "linear_int8_int8_scalar")
    assert torch.equal(on_opencl(case, unit), wanted)


@pytest.mark.parametrize("unit", UNITS)
def test_any_shape(unit: str) -> None:
    for m, n, k in ((2, 1, 1), (8, 16, 64), (9, 7, 63), (64, 17, 65), (129, 15, 577)):
        data = cached_data(case := LinearCase(m, n, k, "bfloat16", "int4", 32, "symmetric", "int8_group", None))
        assert_within(on_opencl(case, unit), data.wanted, data.allowed, f"{unit} {case}")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("factor", [1e-42, 1e-39, 1e30])
def test_tiny_and_huge_activations_keep_their_bits(factor: float, unit: str) -> None:
    case = LinearCase(3, 16, 64, "float32", "float32", 0, "symmetric", "float", None)
    data = make_data(case, torch.randn(3, 64) * factor)
    assert_within(on_opencl(case, unit, data), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("format, x_format", [("float32", "float"), ("nf4", "float"), ("int4", "int8_group"), ("fp8_e4m3", "float8_row")])
def test_rows_with_inf_or_nan_alone_are_not_finite(format: str, x_format: str, unit: str) -> None:
    dtype, group_size = {"float32": ("float32", 0), "nf4": ("bfloat16", 64), "int4": ("bfloat16", 32), "fp8_e4m3": ("bfloat16", 0)}[format]
    case = LinearCase(4, 20, 130, dtype, format, group_size, "symmetric", x_format, None)
    x = torch.randn(4, 130).to(getattr(torch, dtype))
    x[1, 7], x[2, 129] = torch.inf, torch.nan
    y = on_opencl(case, unit, make_data(case, x))
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()
    if format == "float32":  # no part of a finite weight makes nan of inf
        assert y[1].isinf().all()
