# SPDX-License-Identifier: Apache-2.0
"""Rows that count codes from an offset of their own and take it off the sums: large activations at weights that are 0,
and zero points that 24 bits do not hold beside the offset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.formats.spec import LinearSpec
from lowbit.reference import linear as reference
from lowbit.reference.quantize import QuantizedWeight
from lowbit.testing import LinearCase, LinearData, assert_within, make_data, run_linear

N, K = 19, 131
Served = Callable[[Iterable[LinearCase]], list[LinearCase]]
FORMATS = [
    (format, group_size)
    for format in testing.formats_of_kind("integer")
    for group_size in (0, 16, 32)
    if group_size in (0, 32) or _C.FORMAT_FACTS[format]["smallest_group"] == 16
]
LARGE = {"float32": (1e4, 1e7, 1e15, 1e30), "bfloat16": (1e4, 1e30), "float16": (1e4,)}


@functools.cache
def beside_large(case: LinearCase, large: float) -> LinearData:
    """Activations of size 1 but for two of each row, at which most weights are 0."""
    generator = torch.Generator().manual_seed(case.m)
    x, weight = torch.randn(case.m, K, generator=generator), torch.randn(N, K, generator=generator)
    x[:, 3], x[:, 70] = large, -large
    weight[:, 3] = weight[:-1, 70] = 0
    return make_data(case, x.to(getattr(torch, case.dtype)), weight)


def large_cases() -> dict[LinearCase, float]:
    """Each format with each size, dtype and number of rows by turns."""
    sizes = (0, 16, 32, 256)
    formats = [it for it in testing.format_cases() if it[1] in sizes and it[2] != "symmetric_no_clipping_err"]
    cases = {}
    for i, format in enumerate(formats):
        for j, m in enumerate((1, 5, 9, 20, 70)):
            dtype = testing.DTYPES[(i + j) % 3]
            cases[LinearCase(m, N, K, dtype, *format)] = LARGE[dtype][(i + j) // 3 % len(LARGE[dtype])]
    return cases


def test_large_activations_beside_small_ones_are_within_budget(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    sizes = large_cases()
    for case in served(sizes):
        with subtests.test(str(case)):
            data = beside_large(case, sizes[case])
            assert_within(run_linear(case, data, kernel), data.wanted, data.allowed, f"{kernel} {case} {sizes[case]}")


def with_small_zeros(format: str, group_size: int, n: int, k: int) -> tuple[lowbit.QuantLinear, QuantizedWeight]:
    """Zero points from 2^-18 on: float32 has not the bits of 128 and of these."""
    generator = torch.Generator().manual_seed(0)
    groups, spec = -(-k // (group_size or k)), LinearSpec(format, group_size, True)
    code_max = _C.FORMAT_FACTS[format]["code_max"]
    codes = torch.randint(code_max + 1, (n, k), dtype=torch.uint8, generator=generator)
    zero = code_max * 2.0 ** (-20 * torch.rand(n, groups, generator=generator))
    zero[::3] = zero[::3].round()
    layer = lowbit.QuantLinear.pack(codes, 300 * torch.rand(n, groups, generator=generator) + 1, zero, spec)
    codes, scale, zero = layer.unpack()
    return layer, QuantizedWeight.of(codes, scale, zero, format, group_size)


@pytest.mark.parametrize(("format", "group_size"), FORMATS)
def test_a_decoded_weight_is_what_its_parts_say_and_what_many_rows_multiply_by(format: str, group_size: int) -> None:
    layer, parts = with_small_zeros(format, group_size, 37, 70)
    dense, wanted = layer.dequantize(), parts.decode()
    roundings = 1 if group_size else 2  # the scale of a column alone is no power of two
    assert ((dense - wanted).abs() <= roundings * 2.0**-24 * wanted.abs()).all()
    for row in ("scalar", "avx2", "avx512"):
        name = f"linear_{format}_{row}"
        if any(it["name"] == name and it["available"] for it in testing.rows("linear")):
            with lowbit.force_kernel(name):
                assert torch.equal(layer(torch.eye(70)).T, dense), name


def test_zero_points_of_many_bits_are_within_budget(kernel: str, served: Served, subtests: pytest.Subtests) -> None:
    cases = (LinearCase(m, 37, 70, "float32", *format, "asymmetric") for format in FORMATS for m in (1, 3, 20, 70))
    for case in served(cases):
        with subtests.test(str(case)):
            layer, parts = with_small_zeros(case.format, case.group_size, 37, 70)
            x: Tensor = torch.eye(70)[: case.m] if case.m != 20 else torch.randn(case.m, 70)
            wanted, magnitude = reference.product(x, parts), reference.magnitude(x, parts)
            allowed = testing.budget("float32", 1 if case.m != 20 else 70, magnitude=magnitude, linear_result=wanted)
            with lowbit.force_kernel(kernel):
                assert_within(layer(x), wanted, allowed, f"{kernel} {case}")
