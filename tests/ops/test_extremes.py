# SPDX-License-Identifier: Apache-2.0
"""Weights and activations at the ends of their ranges: where narrow integer accumulators overflow and scales vanish."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from largest_products import largest_products
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.formats.spec import LinearSpec
from lowbit.testing import LinearCase, LinearData, assert_within, make_data, run_linear

N, K = 19, 259
Served = Callable[[Iterable[LinearCase]], list[LinearCase]]


CASES = [
    LinearCase(m, N, K, "float32", format, group_size, mapping, x_format)
    for m in (1, 9, 17)
    for format, group_size, mapping, x_format in testing.format_cases()
    if _C.FORMAT_FACTS[format]["kind"] != "float" and group_size in (0, 32) and mapping != "symmetric_no_clipping_err"
]


def alternating(*shape: int) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(torch.Size(shape).numel()) % 2).view(shape)


PATTERNS = {
    "all at the top": lambda *shape: torch.ones(shape),
    "all at the bottom": lambda *shape: -torch.ones(shape),
    "alternating": alternating,
    "one large": lambda *shape: torch.zeros(shape).index_fill_(1, torch.tensor([7]), 1000.0),
    "all zero": lambda *shape: torch.zeros(shape),
    "tiny": lambda *shape: torch.full(shape, 1e-30),
    "huge": lambda *shape: torch.full(shape, 1e15),
}


SHIFTS = [list(zip(PATTERNS, (list(PATTERNS) * 2)[shift:], strict=False)) for shift in (0, 1, 3)]
"""Of weight and of x: the same one, the next, the third; a case has one of these, by turns over m and over the formats."""


@functools.cache
def extreme_data(case: LinearCase, weight_pattern: str, x_pattern: str) -> LinearData:
    return make_data(case, PATTERNS[x_pattern](case.m, K), PATTERNS[weight_pattern](N, K))


def test_extreme_patterns_are_within_budget_on_every_row(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    for case in served(CASES):
        turn = sum(divmod(CASES.index(case), len(CASES) // 3))  # the same formats for each m
        for weight_pattern, x_pattern in SHIFTS[turn % 3]:
            with subtests.test(what=str(case), weight=weight_pattern, x=x_pattern):
                data = extreme_data(case, weight_pattern, x_pattern)
                what = f"{kernel} {case}, weight {weight_pattern}, x {x_pattern}"
                assert_within(run_linear(case, data, kernel), data.wanted, data.allowed, what)


def test_codes_at_the_end_of_the_range_do_not_overflow(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    """All -128 (or -8, 127, 7) against activations of +-127: the largest products there are, over a long k."""
    cases = [
        LinearCase(m, N, 2048, "float32", format, group_size, "symmetric", x_format)
        for format in ("int8", "int4")
        for x_format, group_size, m in itertools.product(_C.FORMAT_FACTS[format]["x_formats"], (0, 32, 256), (1, 5, 33))
    ]
    for case in served(cases):
        # Asymmetric: the range 0..127 in 254 steps, the same value by two roundings.
        tolerance = 1e-5 if case.x_format == "int8_row_asymmetric" else (case.k + 8) * 2.0**-24
        for code in (0, 255 if case.format == "int8" else 15):
            with subtests.test(what=str(case), code=code):
                for y, wanted in largest_products(kernel, case, code):
                    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "format, group_size, x_format",
    [
        (format, size, x_format)
        for format, size, mapping, x_format in testing.format_cases()
        if mapping == "symmetric" and size == (32 if _C.FORMAT_FACTS[format]["bits"] == 4 else 0)
    ],
)
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_inf_and_nan_in_activations_reach_every_result_of_their_row(
    dtype: str, format: str, group_size: int, x_format: str, subtests: pytest.Subtests
) -> None:
    turn = testing.DTYPES.index(dtype)  # each number of rows meets each of the three in some dtype, and each dtype too
    rows = [str(row["name"]) for row in testing.rows("linear") if row["available"]]
    for i, m in enumerate((1, 4, 20)):
        bad = (torch.inf, -torch.inf, torch.nan)[(i + turn) % 3]
        case = LinearCase(m, N, 70, dtype, format, group_size, "symmetric", x_format)
        x, weight = torch.randn(m, 70), torch.randn(N, 70)
        x[m // 2, 69] = bad
        data = make_data(case, x.to(getattr(torch, dtype)), weight)
        taking = [row for row in rows if testing.serves(row, case)]
        assert taking, case
        for row in taking:
            with subtests.test(what=str(case), row=row):
                y = run_linear(case, data, row)
                assert not y[m // 2].isfinite().any(), f"{row} {case}"
                others = [i for i in range(m) if i != m // 2]
                assert_within(y[others], data.wanted[others], data.allowed[others], f"{row} {case}")


def test_the_unit_matrix_gives_x_back_to_the_last_bit(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    """Whatever parts a kernel cuts a float32 into, none is lost: also of rows at the ends of its range."""
    n = 37
    for case in served(LinearCase(m, n, n, "float32", format) for format in ("float32", "bfloat16", "float16") for m in (1, 9, 20, 70)):
        with subtests.test(str(case)):
            x = torch.randn(case.m, n) * torch.tensor([1.0, 1e-37, 1e37, 1e-20])[torch.arange(case.m) % 4, None]
            x[2::4, 3] = torch.finfo(torch.float32).max
            assert torch.equal(run_linear(case, make_data(case, x, torch.eye(n)), kernel), x), f"{kernel} {case}"


def test_the_unit_matrix_gives_every_level_of_fp8_to_the_last_bit(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    """16 columns x 4 k without subnormals and zeros are decoded in fewer steps: with, without, with one of them."""
    n, k = 80, 128
    cases = served(LinearCase(m, n, k, "float32", "fp8_e4m3") for m in (1, 5, 9, 128))
    levels = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    normal = levels[levels >= 2.0**-6]
    weight = torch.empty(n, k)
    for half, some in enumerate((normal, levels)):
        weight[:, 64 * half : 64 * half + 64] = some[torch.arange(n * 64).view(n, 64) * 7 % len(some)]
    weight *= alternating(n, k)
    weight[::16, 9], weight[5::16, 18] = 0.0, -(2.0**-9)
    weight[:, 0] = levels[-1]  # every scale is 1
    for case in cases:
        with subtests.test(str(case)):
            y = run_linear(case, make_data(case, torch.eye(k)[: case.m], weight), kernel)
            assert torch.equal(y, weight.T[: case.m]), f"{kernel} {case}"


def test_zero_points_far_from_the_codes_are_exact(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    """Those of imported weights need not lie among the codes, nor be whole."""
    m, n, k = 20, 19, 70
    for case in served(LinearCase(m, n, k, "float32", format, 32, "asymmetric") for format in ("int8", "int4")):
        with subtests.test(str(case)):
            codes = torch.randint(2 ** _C.FORMAT_FACTS[case.format]["bits"], (n, k), dtype=torch.uint8)
            zero = torch.tensor([-1000.0, -40.25, 7.5, 300.25, 0.0, 1000.0, 15.0])[torch.arange(n * 3) % 7].view(n, 3)
            layer = lowbit.QuantLinear.pack(codes, torch.full((n, 3), 0.25), zero, LinearSpec(case.format, 32, True))
            x, weight = torch.randn(m, k), 0.25 * (codes - zero.double().repeat_interleave(32, 1)[:, :k])
            with lowbit.force_kernel(kernel):
                y = layer(x)
            assert_within(y, x.double() @ weight.T, (k + 8) * 2.0**-24 * (x.double().abs() @ weight.abs().T), kernel)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("format", ["float32", "int8", "int4", "nf4", "fp8_e4m3"])
def test_inf_and_nan_in_weights_are_refused_at_packing(format: str, bad: float) -> None:
    weight = torch.randn(5, 40)
    weight[3, 39] = bad
    with pytest.raises(ValueError, match="quantize: weight must be finite"):
        testing.pack_weight(weight, format)


def test_zero_groups_decode_to_zero(subtests: pytest.Subtests) -> None:
    for format, group_size, mapping, x_format in testing.format_cases():
        with subtests.test(format=format, group_size=group_size, mapping=mapping, x_format=x_format):
            if group_size == 32 and x_format == "float":
                weight = torch.randn(20, 128)
                weight[:, 32:64] = 0
                weight[7] = 0
                packed = testing.pack_weight(weight, format, 32, mapping)
                decoded = testing.decode_weight(packed, 20, 128, format, 32, mapping).decode()
                assert (decoded[:, 32:64] == 0).all() and (decoded[7] == 0).all() and decoded.isfinite().all()
