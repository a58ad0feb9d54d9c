# SPDX-License-Identifier: Apache-2.0
"""int8_pack: the bytes of quantize, in order and transposed, by every row; what is not finite; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced

from lowbit import _C, testing

ROWS = [str(row["name"]) for row in testing.rows("int8_pack") if row["available"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
int8_pack = torch.ops.lowbit.int8_pack


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, k", [(1, 1), (3, 15), (16, 64), (17, 66), (130, 257), (300, 63), (70, 4099)])
def test_the_bytes_are_those_of_quantize(row: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Rows of other sizes, one of zeros, one whose scale would be subnormal. The last are large enough for threads."""
    weight = torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None]
    weight[n // 2], weight[-1] = 0, 1e-38
    weight = weight.to(dtype)
    wanted = testing.pack_weight(weight, "int8", 0, "symmetric_no_clipping_err")
    with forced(row):
        packed = int8_pack(weight)
        transposed = int8_pack(weight.T.contiguous().T)
        strided = int8_pack(weight.repeat_interleave(2, 1)[:, ::2])
    assert packed.equal(wanted) and transposed.equal(wanted) and strided.equal(wanted)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_has_the_scale_nan(row: str, bad: float) -> None:
    weight = torch.randn(21, 70)
    other = weight.clone()
    weight[18, 66], other[18] = bad, 0
    x = torch.randn(5, 70)
    numbers = 21, 70, _C.FORMATS["int8"], 0, False, _C.X_FORMATS["int8_row"]
    for of in (weight, weight.T.contiguous().T):
        with forced(row):
            y, wanted = (torch.ops.lowbit.linear(x, int8_pack(w), *numbers) for w in (of, other))
        assert y[:, 18].isnan().all()
        y[:, 18] = wanted[:, 18]
        assert y.equal(wanted)


@pytest.mark.parametrize("change, error, text", [
    (torch.randn(4), ValueError, r"weight must have shape \[n, k\], got \[4\]"),
    (torch.zeros(4, 4, dtype=torch.float64), TypeError, "weight must be float32, bfloat16 or float16, got float64"),
    (torch.zeros(0, 4), ValueError, "n and k must be at least 1, got n=0 k=4"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: Any, error: type[Exception], text: str) -> None:
    refused_alike(int8_pack, {"weight": change}, error, f"int8_pack: {text}")


def test_torchs_checks_of_the_registration() -> None:
    for weight in (torch.randn(19, 70), torch.randn(70, 19).T, torch.randn(40, 70)[::2]):
        torch.library.opcheck(int8_pack.default, (weight,))
