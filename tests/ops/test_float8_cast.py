# SPDX-License-Identifier: Apache-2.0
"""float8_cast: every row against torch's cast of numbers that are scaled in float64, bit for bit; what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced
from torch import Tensor

from lowbit import testing

ROWS = [str(row["name"]) for row in testing.rows("float8_cast") if row["available"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHOICES = list(itertools.product((False, True), (-1, 0, 1), (False, True), (False, True)))  # e5m2, dim, power_of_2, bfloat16


def float8_cast(x: Tensor, e5m2: bool, dim: int, power_of_2: bool, bfloat16: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.lowbit.float8_cast(x, e5m2, dim, power_of_2, bfloat16)


def definition(x: Tensor, e5m2: bool, dim: int, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Values in float64, and divisors."""
    kind = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    amax = x.double().abs().amax((0, 1) if dim < 0 else dim, keepdim=True)
    scale = (torch.finfo(kind).max / torch.where(amax.isfinite(), amax, torch.nan).clamp(min=1e-12)).float()
    below = torch.where(scale.isnan(), scale.double(), 2.0 ** scale.double().log2().floor())
    scale, power = (below.float(), below) if power_of_2 else (scale, 2 * below)
    return (x.float() * scale).to(kind).double() / power, scale / power


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.double().equal(wanted.double()) or bool(((got.double() == wanted) | (got.isnan() & wanted.isnan())).all())


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 15), (2, 16), (17, 33), (5, 257), (700, 131), (70, 4099)])
def test_every_row_gives_torchs_codes(row: str, dtype: torch.dtype, rows: int, columns: int, subtests: pytest.Subtests) -> None:
    """The last two are large enough for several threads. Magnitudes differ by row and column; two are 0."""
    x = torch.randn(rows, columns) * torch.logspace(-4, 2, rows)[:, None] * torch.logspace(-1, 1, columns)
    x[0], x[:, -1] = 0, 0
    x = x.to(dtype)
    for choice in CHOICES:
        with subtests.test(choice=choice), forced(row):
            values, divisor = float8_cast(x, *choice)
            assert values.dtype == (torch.bfloat16 if choice[-1] else torch.float32) and divisor.dtype == torch.float32
            wanted, divisors = definition(x, *choice[:-1])
            assert divisor.shape == divisors.shape and same(divisor, divisors.double())
            assert same(values, wanted)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_16_bits(row: str, dtype: torch.dtype) -> None:
    """Ties, subnormal numbers and the ends of each range, in rows of few magnitudes and of all. (Numbers from 1.9 * 2^126 on,
    of which the largest round up to inf, are left out.)"""
    kind = torch.float16 if dtype is torch.float16 else torch.bfloat16
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    x = torch.where(x.float().abs() <= 1.9 * 2.0**126, x, 0).to(dtype).view(256, 256)
    for x_, choice in itertools.product((x, x.T), CHOICES):
        with forced(row):
            values, divisor = float8_cast(x_, *choice)
        wanted, divisors = definition(x_, *choice[:-1])
        assert same(values, wanted) and same(divisor, divisors.double()), choice


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_has_a_scale_with_one_that_is_not_finite_is_nan(row: str, bad: float) -> None:
    x = torch.randn(5, 40)
    x[2, 33] = bad
    for choice in CHOICES:
        with forced(row):
            values, divisor = float8_cast(x, *choice)
        wanted, divisors = definition(x, *choice[:-1])
        assert same(values, wanted) and same(divisor, divisors.double())
        assert values.isnan().sum() == {-1: 5 * 40, 0: 5, 1: 40}[choice[1]]


def test_no_rows_and_no_columns() -> None:
    for shape, choice in itertools.product(((0, 20), (4, 0), (0, 0)), CHOICES):
        values, divisor = float8_cast(torch.empty(shape), *choice)
        assert values.shape == shape and not divisor.isnan().any()


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(4)}, ValueError, r"x must have shape \[rows, columns\], got \[4\]"),
    ({"x": torch.zeros(4, 4, dtype=torch.int8)}, TypeError, "x must be float32, bfloat16 or float16, got int8"),
    ({"dim": 2}, ValueError, "dim must be 0, 1, or -1 for one scale, got 2"),
    ({"dim": -2}, ValueError, "dim must be 0, 1, or -1 for one scale, got -2"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    call = {"x": torch.randn(3, 20), "e5m2": False, "dim": 1, "power_of_2": True, "bfloat16": False} | change
    refused_alike(torch.ops.lowbit.float8_cast, call, error, f"float8_cast: {text}")


def test_torchs_checks_of_the_registration() -> None:
    for choice in CHOICES:
        torch.library.opcheck(torch.ops.lowbit.float8_cast.default, (torch.randn(4, 20), *choice))
