# SPDX-License-Identifier: Apache-2.0
"""layer_norm and pointwise: every row against float64, and what they refuse with and without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced
from torch import Tensor

from lowbit import testing
from lowbit.ops.layer_norm import layer_norm
from lowbit.ops.pointwise import pointwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
SIZES = [(1, 1), (3, 15), (1, 16), (2, 17), (5, 257), (2000, 131), (70, 4099)]
ONES = torch.ones(2, 4)


def rows(op: str) -> list[str]:
    return [str(row["name"]) for row in testing.rows(op) if row["available"]]


def allowed(wanted: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """With the rounding of the result."""
    roundoff = testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    return error + roundoff * (wanted.abs() + error + torch.finfo(dtype).smallest_normal)


@pytest.mark.core
@pytest.mark.parametrize("row", rows("layer_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", SIZES)
def test_every_row_is_within_the_roundings_of_its_sums(row: str, dtype: torch.dtype, m: int, n: int, subtests: pytest.Subtests) -> None:
    """A mean far from 0 moves each distance by n / 2 + 4 roundings of the largest element."""
    x = (torch.randn(m, n) + torch.linspace(-2, 2, m)[:, None]).to(dtype)
    wide = x.double()
    for given, offset in ((("weight", "bias", "add"), 0.0), (("weight",), 1.0), ((), 0.0)):
        with subtests.test(given=given):
            weight, bias = (torch.randn(n) if name in given else None for name in ("weight", "bias"))
            add = torch.randn(m, n).to(dtype) if "add" in given else None
            with forced(row):
                y = layer_norm(x, weight, bias, EPS, offset=offset, add=add)
            spread = (wide.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()
            factor = torch.ones(n).double() if weight is None else weight.double() + offset
            normalized = (wide - wide.mean(-1, keepdim=True)) / spread
            wanted = normalized * factor + sum(term.double() for term in (bias, add) if term is not None)
            sizes = (normalized.abs() + 2 * wide.abs().amax(-1, keepdim=True) / spread + 1) * (factor.abs() + abs(offset))
            sizes = sizes + sum(term.double().abs() for term in (bias, add) if term is not None)
            error = ((n + 8) / 2 + 8) * testing.ROUNDOFF["float32"] * sizes
            testing.assert_within(y, wanted, allowed(wanted, error, dtype), what=row)


@pytest.mark.core
@pytest.mark.parametrize("row", rows("pointwise"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", range(3))
def test_every_function_of_every_row(row: str, dtype: torch.dtype, function: int) -> None:
    for m, n in SIZES:
        x, add = (3 * torch.randn(m, n)).to(dtype), torch.randn(m, n).to(dtype)
        with forced(row):
            y = pointwise(x, function, scale=-0.7, add=add, positive=0.8, negative=0.6, linear=0.5)
        wide = x.double()
        below = wide.clamp(max=0)
        value = (wide, wide.relu() ** 2, 0.8 * wide.relu() ** 2 + 0.6 * (below.expm1() - below) + 0.5 * wide)[function]
        sizes = 0.7 * (value.abs() + wide.abs() + 2) + add.double().abs()
        wanted = -0.7 * value + add.double()
        testing.assert_within(y, wanted, allowed(wanted, 10 * testing.ROUNDOFF["float32"] * sizes, dtype), what=row)


def test_any_strides_any_rank_and_no_elements() -> None:
    x, weight = torch.randn(4, 3, 5, 20), torch.randn(40)[::2]
    assert torch.equal(layer_norm(x.transpose(0, 2), weight), layer_norm(x, weight).transpose(0, 2))
    assert layer_norm(x[:0], weight).shape == pointwise(x[:0]).shape == (0, 3, 5, 20)
    assert layer_norm(torch.empty(3, 0)).shape == (3, 0)
    assert torch.equal(pointwise(x.transpose(0, 2), 1), x.transpose(0, 2).relu().square())


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = torch.randn(3, 40)
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    y = layer_norm(x)
    assert y[:2].isnan().all() and y[2].isfinite().all()
    assert pointwise(x, 1)[1, 5].isnan() and pointwise(x, 2)[1, 5].isnan()


@pytest.mark.parametrize(
    "function, given, error, text",
    [
        (layer_norm, {"x": ONES.double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
        (layer_norm, {"x": torch.ones(())}, ValueError, r"x must have shape \[\.\.\., n\], got \[\]"),
        (layer_norm, {"x": ONES, "weight": torch.ones(3)}, ValueError, r"weight must have shape \[4\], got \[3\]"),
        (layer_norm, {"x": ONES, "bias": ONES}, ValueError, r"bias must have shape \[4\], got \[2, 4\]"),
        (layer_norm, {"x": ONES, "eps": -1.0}, ValueError, "eps must be finite and not negative, got -1"),
        (layer_norm, {"x": ONES, "add": ONES.half()}, TypeError, "add must be float32, got float16"),
        (layer_norm, {"x": ONES.clone().requires_grad_()}, NotImplementedError, "no argument may require a gradient"),
        (pointwise, {"x": ONES.int()}, TypeError, "x must be float32, bfloat16 or float16, got int32"),
        (pointwise, {"x": ONES, "function": 3}, ValueError, "function must be 0 to 2, got 3"),
        (pointwise, {"x": ONES, "scale": float("inf")}, ValueError, "scale must be finite, got inf"),
        (pointwise, {"x": ONES, "add": ONES[0]}, ValueError, r"add must have shape \[2, 4\], got \[4\]"),
    ],
)
def test_a_bad_argument_is_named_with_data_and_without(
    function: Any, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    refused_alike(function, given, error, f"{function.__name__}: {text}")
