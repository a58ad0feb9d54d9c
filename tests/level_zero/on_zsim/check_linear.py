# SPDX-License-Identifier: Apache-2.0
"""linear by the rows for Intel GPUs: within the budget of the CPU's rows, and their bits where arithmetic is exact.

A kind of call is a module of its own, which OpenCL compiles in one to three seconds where dpas is shuffles: each device
that has it takes a share of the kinds.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.cuda.linear_calls import run

from lowbit import testing
from lowbit.devices import level_zero
from lowbit.testing import LinearCase, LinearData, assert_within, cached_data, make_data

level_zero.enable()
DEVICE = "lowbit_ze"
UNIT = {"0x0bd5": "pvc", "0x5690": "dg2"}.get(os.environ.get("ZSIM_DEVICE", ""), "")
N, K = 37, 150  # neither fills its last panel or tile
KINDS = {
    (dtype, format, group_size, mapping, x_format): post_ops
    for dtype, format, group_size, mapping, x_format, *post_ops in (
        ("float32", "float32", 0, "symmetric", "float", "float32", "relu", True, False),
        ("float32", "int4", 32, "asymmetric", "float", "float32", "gelu_tanh", True, True),
        ("float16", "float16", 0, "symmetric", "float", "dtype of x", "silu", True, True),
        ("bfloat16", "bfloat16", 0, "symmetric", "float", "dtype of x", "none", False, True),
        ("bfloat16", "nf4", 64, "symmetric", "float", None, "none", False, False),
        ("float16", "fp4", 128, "symmetric", "float", None, "none", False, False),
        ("bfloat16", "int8", 0, "symmetric", "float", None, "gelu", False, False),
        ("bfloat16", "fp4_e2m1", 16, "symmetric", "float", None, "none", False, True),
        ("bfloat16", "fp8_e4m3", 0, "symmetric", "float8_row", "float32", "none", False, False),
        ("float16", "int7", 128, "symmetric", "float", None, "none", False, False),
        ("bfloat16", "int4", 32, "symmetric", "int8_group", "float32", "silu", True, False),
        ("float16", "int3", 0, "asymmetric", "int8_row_asymmetric", None, "none", False, False),
    )
}
OF_DPAS = {"pvc": ("float32", "bfloat16", "fp4_e2m1", "fp8_e4m3"), "dg2": ("float16", "nf4", "int7", "int3")}
OWN = [kind for kind in KINDS if not UNIT or kind[1] in OF_DPAS[UNIT] or kind[1:3] == ("int4", 32)]
ROWS = (1, 13, 70)  # the three kernels


def row_of(case: LinearCase) -> str:
    codes = "int8_" if case.x_format.startswith("int8") else ""
    return f"linear_{case.format}_{codes}{'dpas_' if UNIT else ''}level_zero"


def on_gpu(case: LinearCase, data: LinearData | None = None) -> torch.Tensor:
    return run(case, DEVICE, row_of(case), data)


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: "-".join(map(str, kind)))
def test_every_kind_is_within_budget_of_the_float64_reference(kind: tuple[str, str, int, str, str]) -> None:
    for m in ROWS:
        data = cached_data(case := LinearCase(m, N, K, *kind, *KINDS[kind]))
        assert_within(on_gpu(case), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("format", ["int4"] if UNIT else testing.dense_formats())
def test_every_format_is_multiplied_or_refused_by_name(format: str) -> None:
    data = cached_data(case := LinearCase(3, N, K, "bfloat16", format, 0, "symmetric", "float", None))
    try:
        assert_within(on_gpu(case), data.wanted, data.allowed, str(case))
    except NotImplementedError as error:
        assert f"{row_of(case)}: the products on Intel GPUs do not read this format" in str(error)
        assert format not in {kind[1] for kind in KINDS} | {"int2", "int5", "int6"}


@pytest.mark.parametrize("m", ROWS)
def test_sums_of_codes_have_the_bits_of_the_cpu(m: int) -> None:
    case = LinearCase(m, N, K, "float32", "int8", 0, "symmetric", "int8_row", None)
    assert torch.equal(on_gpu(case), testing.run_linear(case, cached_data(case), "linear_int8_int8_scalar"))


@pytest.mark.parametrize("m, n, k", [(2, 1, 1), (8, 16, 64), (9, 7, 63), (64, 17, 65), (129, 15, 577)])
def test_any_shape(m: int, n: int, k: int) -> None:
    data = cached_data(case := LinearCase(m, n, k, "bfloat16", "int4", 32, "symmetric", "int8_group", None))
    assert_within(on_gpu(case), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("factor", [1e-42, 1e-39, 1e30])
def test_tiny_and_huge_activations_keep_their_bits(factor: float) -> None:
    case = LinearCase(3, 16, 64, "float32", "float32", 0, "symmetric", "float", None)
    data = make_data(case, torch.randn(3, 64) * factor)
    assert_within(on_gpu(case, data), data.wanted, data.allowed, str(case))


FORMATS = [("float32", "float32", 0, "float"), ("bfloat16", "nf4", 64, "float"), ("bfloat16", "int4", 32, "int8_group"), ("bfloat16", "fp8_e4m3", 0, "float8_row")][: 2 if UNIT else 4]  # fmt: skip


@pytest.mark.parametrize("dtype, format, group_size, x_format", FORMATS)
def test_rows_with_inf_or_nan_alone_are_not_finite(dtype: str, format: str, group_size: int, x_format: str) -> None:
    case = LinearCase(4, 20, 130, dtype, format, group_size, "symmetric", x_format, None)
    x = torch.randn(4, 130).to(getattr(torch, dtype))
    x[1, 7], x[2, 129] = torch.inf, torch.nan
    y = on_gpu(case, make_data(case, x))
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()
    if format == "float32":  # no part of a finite weight makes nan of inf
        assert y[1].isinf().all()


def test_the_same_call_has_the_same_bits_and_leaves_no_memory() -> None:
    case = LinearCase(70, N, K, "bfloat16", "int4", 32, "symmetric", "int8_group", None)
    first, before = on_gpu(case), torch.lowbit_ze.memory_allocated()
    assert torch.equal(first, on_gpu(case)) and torch.lowbit_ze.memory_allocated() == before
