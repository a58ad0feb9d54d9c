# SPDX-License-Identifier: Apache-2.0
"""Sums over more k than an int32 can hold: 132,104 products of 128 * 127."""

from __future__ import annotations

import pytest
import torch
from largest_products import largest_products

from lowbit import _C, testing
from lowbit.testing import LinearCase

N = 17
EXACT_K = 1 << 17  # csrc/cpu/linear/activations.hpp: a longer row is summed in pieces


@pytest.mark.parametrize("format, code", [("int8", 0), ("int8", 255), ("int4", 0), ("int4", 15)])
@pytest.mark.parametrize("k", [EXACT_K, EXACT_K + 1, 132_104, 132_105, 150_016, 2 * EXACT_K + 65])
def test_the_largest_products_of_one_sign_do_not_wrap(kernel: str, format: str, code: int, k: int) -> None:
    for m in (1, 17):
        for x_format in _C.FORMAT_FACTS[format]["x_formats"]:
            case = LinearCase(m, N, k, "float32", format, 0, "symmetric", x_format)
            if x_format == "float" or not testing.serves(kernel, case):
                continue
            for y, wanted in largest_products(kernel, case, code):
                torch.testing.assert_close(y, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("x_format", ["int8_group", "int8_row", "int8_row_asymmetric"])
def test_every_zero_point_over_a_long_row_with_a_drift(kernel: str, format: str, mapping: str, x_format: str) -> None:
    """A mean in both factors adds up over k; pieces end inside a tile of rows and at an odd k."""
    for m, k in ((1, 150_016), (18, EXACT_K + 33)):
        case = LinearCase(m, 3, k, "float32", format, 0, mapping, x_format)
        if not testing.serves(kernel, case):
            continue
        generator = torch.Generator().manual_seed(k)
        x = torch.rand(m, k, generator=generator) + 0.5
        weight = torch.rand(3, k, generator=generator) + 0.5
        data = testing.make_data(case, x, weight)
        testing.assert_within(testing.run_linear(case, data, kernel), data.wanted, data.allowed, f"{kernel} {case}")


def test_rows_agree_bit_for_bit_on_long_sums() -> None:
    for format in ("int8", "int4"):
        case = LinearCase(3, 5, 150_016, "float32", format, 0, "asymmetric", "int8_row")
        data = testing.make_data(case, torch.randn(3, case.k) + 1, torch.randn(5, case.k) + 1)
        names = [
            str(row["name"])
            for row in testing.rows("linear")
            if row["available"] and testing.serves(str(row["name"]), case)
        ]
        results = [testing.run_linear(case, data, name) for name in names]
        assert len(results) > 1 and all(torch.equal(result, results[0]) for result in results), names
