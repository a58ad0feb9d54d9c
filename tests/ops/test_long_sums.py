# SPDX-License-Identifier: Apache-2.0
"""Sums over more k than an int32 can hold: 132,104 products of 128 * 127."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from largest_products import largest_products

from lowbit import testing
from lowbit.testing import LinearCase, LinearData

N = 17
Served = Callable[[Iterable[LinearCase]], list[LinearCase]]
EXACT_K = 1 << 17  # csrc/cpu/linear/activations.hpp: a longer row is summed in pieces
INT8 = ("int8_group", "int8_row", "int8_row_asymmetric")


# Every length with every format of x; rows of x and the end of the range by turns, so that each pair of these is there.
LARGEST = [
    (LinearCase((1, 17)[(i + j) % 2], N, k, "float32", format, 0, "symmetric", x_format), ends[(i // 2 + j) % 2])
    for format, ends in (("int8", (0, 255)), ("int4", (0, 15)))
    for i, k in enumerate((EXACT_K, EXACT_K + 1, 132_104, 132_105, 150_016, 2 * EXACT_K + 65))
    for j, x_format in enumerate(INT8)
]
DRIFTING = [
    LinearCase(m, 3, k, "float32", format, 0, mapping, x_format)
    for m, k in ((1, 150_016), (18, EXACT_K + 33))
    for format, mapping, x_format in itertools.product(("int8", "int4"), ("symmetric", "asymmetric"), INT8)
]


def test_the_largest_products_of_one_sign_do_not_wrap(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    taken = served(case for case, _ in LARGEST)
    for case, code in LARGEST:
        with subtests.test(what=str(case), code=code):
            for y, wanted in largest_products(kernel, case, code) if case in taken else ():
                torch.testing.assert_close(y, wanted, rtol=1e-5, atol=0)


@functools.cache
def drifting(case: LinearCase) -> LinearData:
    generator = torch.Generator().manual_seed(case.k)
    x = torch.rand(case.m, case.k, generator=generator) + 0.5
    return testing.make_data(case, x, torch.rand(3, case.k, generator=generator) + 0.5)


def test_every_zero_point_over_a_long_row_with_a_drift(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    """A mean in both factors adds up over k; pieces end inside a tile of rows and at an odd k."""
    for case in served(DRIFTING):
        with subtests.test(str(case)):
            data = drifting(case)
            testing.assert_within(testing.run_linear(case, data, kernel), data.wanted, data.allowed, f"{kernel} {case}")


@pytest.mark.parametrize("format", ("int8", "int4"))
def test_rows_agree_bit_for_bit_on_long_sums(format: str) -> None:
    case = LinearCase(3, 5, 150_016, "float32", format, 0, "asymmetric", "int8_row")
    data = testing.make_data(case, torch.randn(3, case.k) + 1, torch.randn(5, case.k) + 1)
    names = [
        str(row["name"])
        for row in testing.rows("linear")
        if row["available"] and testing.serves(str(row["name"]), case)
    ]
    results = [testing.run_linear(case, data, name) for name in names]
    assert len(results) > 1 and all(torch.equal(result, results[0]) for result in results), names
