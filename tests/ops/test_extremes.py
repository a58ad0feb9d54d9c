# SPDX-License-Identifier: Apache-2.0
"""Weights and activations at the ends of their ranges: where narrow integer accumulators overflow and scales vanish."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from lowbit import _C, testing
from lowbit.testing import LinearCase, LinearData, assert_within, make_data, run_linear

N, K = 19, 259


CASES = [
    LinearCase(m, N, K, "float32", format, group_size, mapping, x_format)
    for m in (1, 9)
    for format in ("int8", "int4")
    for group_size in (0, 32)
    for mapping in ("symmetric", "asymmetric")
    for x_format in _C.X_FORMATS
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


PAIRS = [(weight, x) for i, weight in enumerate(PATTERNS) for j, x in enumerate(PATTERNS) if (j - i) % len(PATTERNS) in (0, 1, 3)]


@functools.cache
def extreme_data(case: LinearCase, weight_pattern: str, x_pattern: str) -> LinearData:
    return make_data(case, PATTERNS[x_pattern](case.m, K), PATTERNS[weight_pattern](N, K))


def test_extreme_patterns_are_within_budget_on_every_row(kernel: str) -> None:
    for case in CASES:
        if not testing.serves(kernel, case):
            continue
        for weight_pattern, x_pattern in PAIRS:
            data = extreme_data(case, weight_pattern, x_pattern)
            what = f"{kernel} {case}, weight {weight_pattern}, x {x_pattern}"
            assert_within(run_linear(case, data, kernel), data.wanted, data.allowed, what)


@pytest.mark.parametrize("format, code", [("int8", 0), ("int8", 255), ("int4", 0), ("int4", 15)])
def test_codes_at_the_end_of_the_range_do_not_overflow(kernel: str, format: str, code: int) -> None:
    """All -128 (or -8, 127, 7) against activations of +-127: the largest products there are, over a long k."""
    k = 2048
    for group_size in (0, 32, 256):
        groups = -(-k // group_size) if group_size else 1
        codes, scale = torch.full((N, k), code, dtype=torch.uint8), torch.ones(N, groups)
        packed = testing.pack_codes(codes, scale, None, format, group_size)
        for x_format in _C.X_FORMATS:
            for m in (1, 5, 33):
                case = LinearCase(m, N, k, "float32", format, group_size, "symmetric", x_format)
                if not testing.serves(kernel, case):
                    continue
                for sign in (1, -1):
                    x = torch.full((m, k), 127.0 * sign)
                    previous = _C.force_kernel(kernel)
                    try:
                        y = torch.ops.lowbit.linear(x, packed, *case.op_args)
                    finally:
                        _C.force_kernel(previous)
                    step = code - (128 if format == "int8" else 8)
                    wanted = torch.full((m, N), 127.0 * sign * step * k, dtype=torch.float64)
                    if x_format == "int8_row_asymmetric":  # the range 0..127 in 254 steps: the same value, two roundings
                        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=0)
                    else:
                        torch.testing.assert_close(y.double(), wanted, rtol=(k + 8) * 2.0**-24, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "format, group_size, x_format",
    [(name, 0, "float") for name in ("float32", "bfloat16", "float16")]
    + [(name, size, x_format) for name, size in (("int8", 0), ("int4", 32)) for x_format in _C.X_FORMATS],
)
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_inf_and_nan_in_activations_reach_every_result_of_their_row(
    dtype: str, format: str, group_size: int, x_format: str, bad: float
) -> None:
    for m in (1, 4, 20):
        case = LinearCase(m, N, 70, dtype, format, group_size, "symmetric", x_format)
        x, weight = torch.randn(m, 70), torch.randn(N, 70)
        x[m // 2, 69] = bad
        data = make_data(case, x.to(getattr(torch, dtype)), weight)
        for row in testing.rows("linear"):
            if row["available"] and testing.serves(str(row["name"]), case):
                y = run_linear(case, data, str(row["name"]))
                assert not y[m // 2].isfinite().any(), f"{row['name']} {case}"
                others = [i for i in range(m) if i != m // 2]
                assert_within(y[others], data.wanted[others], data.allowed[others], f"{row['name']} {case}")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("format", ["float32", "int8", "int4"])
def test_inf_and_nan_in_weights_are_refused_at_packing(format: str, bad: float) -> None:
    weight = torch.randn(5, 40)
    weight[3, 39] = bad
    with pytest.raises(ValueError, match="quantize: weight must be finite"):
        testing.pack_weight(weight, format)


def test_zero_groups_decode_to_zero() -> None:
    for format in ("int8", "int4"):
        for mapping in _C.MAPPINGS:
            weight = torch.randn(20, 128)
            weight[:, 32:64] = 0
            weight[7] = 0
            packed = testing.pack_weight(weight, format, 32, mapping)
            decoded = testing.decode_weight(packed, 20, 128, format, 32, mapping).decode()
            assert (decoded[:, 32:64] == 0).all() and (decoded[7] == 0).all() and decoded.isfinite().all()
