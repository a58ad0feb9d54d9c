# SPDX-License-Identifier: Apache-2.0
"""rms_norm: every row against float64, what it refuses with and without data, torch's checks of the registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced
from torch import Tensor

from lowbit import testing
from lowbit.ops.rms_norm import rms_norm

ROWS = [str(row["name"]) for row in testing.rows("rms_norm") if row["available"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


def wanted_and_allowed(x: Tensor, weight: Tensor, offset: float, add: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64; and the error of a float32 sum of n squares, in any order, under a root (which halves it), of root,
    division, mean, eps, two products and two sums, and of rounding the result."""
    wide, dtype = x.double(), str(x.dtype).removeprefix("torch.")
    normalized = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    wanted = normalized * (offset + weight.double())
    sizes = normalized.abs() * (abs(offset) + weight.double().abs())  # offset + weight may cancel
    if add is not None:
        wanted, sizes = wanted + add.double(), sizes + add.double().abs()
    error = ((x.shape[-1] + 8) / 2 + 6) * testing.ROUNDOFF["float32"] * sizes
    smallest = torch.finfo(x.dtype).smallest_normal
    return wanted, error + testing.ROUNDOFF[dtype] * (wanted.abs() + error + smallest)


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", [(1, 1), (3, 15), (1, 16), (2, 17), (5, 257), (2000, 131), (70, 4099)])
def test_every_row_is_within_the_roundings_of_its_sum(row: str, dtype: torch.dtype, m: int, n: int, subtests: pytest.Subtests) -> None:
    """The last two are large enough for several threads."""
    x = (torch.randn(m, n) * torch.logspace(-3, 1, m)[:, None]).to(dtype)
    x[0] = 0
    for weight_dtype, offset, add in zip(DTYPES, (0.0, 1.0, -0.5), (None, torch.randn(m, n).to(dtype), None), strict=True):
        with subtests.test(weight_dtype=weight_dtype, offset=offset, add=add is not None):
            weight = torch.randn(n).to(weight_dtype)
            with forced(row):
                y = rms_norm(x, weight, EPS, offset=offset, add=add)
            assert y.dtype == dtype
            testing.assert_within(y, *wanted_and_allowed(x, weight, offset, add), what=row)


def test_any_strides_any_rank_and_no_elements() -> None:
    x, weight = torch.randn(4, 3, 5, 20), torch.randn(40)[::2]
    assert torch.equal(rms_norm(x.transpose(0, 2), weight), rms_norm(x, weight).transpose(0, 2))
    assert torch.equal(rms_norm(x[0, 0, 0], weight), rms_norm(x, weight)[0, 0, 0])
    assert rms_norm(x[:0], weight).shape == (0, 3, 5, 20)
    assert rms_norm(torch.empty(3, 0), torch.empty(0)).shape == (3, 0)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = torch.randn(3, 40)
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    y = rms_norm(x, torch.ones(40))
    assert y[0, 3].isnan() and (y[0, :3] == 0).all() and y[1].isnan().all() and y[2].isfinite().all()


ONES = torch.ones(2, 4)


@pytest.mark.parametrize(
    "x, weight, more, error, text",
    [
        (ONES.double(), ONES[0], {}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
        (torch.ones(()), ONES[0], {}, ValueError, r"x must have shape \[\.\.\., n\], got \[\]"),
        (ONES, ONES[0].int(), {}, TypeError, "weight must be float32, bfloat16 or float16, got int32"),
        (ONES, torch.ones(3), {}, ValueError, r"weight must have shape \[4\], got \[3\]"),
        (ONES, ONES, {}, ValueError, r"weight must have shape \[4\], got \[2, 4\]"),
        (ONES, ONES[0], {"eps": -1.0}, ValueError, "eps must be finite and not negative, got -1"),
        (ONES, ONES[0], {"eps": float("nan")}, ValueError, "eps must be finite and not negative, got nan"),
        (ONES, ONES[0], {"offset": float("inf")}, ValueError, "offset must be finite, got inf"),
        (ONES, ONES[0], {"add": ONES.half()}, TypeError, "add must be float32, got float16"),
        (ONES, ONES[0], {"add": ONES[0]}, ValueError, r"add must have shape \[2, 4\], got \[4\]"),
    ],
)
def test_a_bad_argument_is_named_with_data_and_without(
    x: Tensor, weight: Tensor, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    refused_alike(rms_norm, {"x": x, "weight": weight, **more}, error, f"rms_norm: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20, 5).mT.to(dtype)
    torch.library.opcheck(torch.ops.lowbit.rms_norm.default, (x, torch.randn(20), EPS, 1.0, x * 2))
