# SPDX-License-Identifier: Apache-2.0
"""How many parallel regions a call opens: one, whatever its phases (preparing activations, products, sums)."""

from __future__ import annotations

import pytest
import torch
from settings import ambient
from tests import internals
from torch import Tensor

from lowbit import _C, testing

N, K = 640, 512
FORMATS = [("int4", 32, "int8_group"), ("int8", 0, "int8_row"), ("int4", 32, "float"), ("bfloat16", 0, "float"), ("int8_semi_sparse", 0, "float")]  # fmt: skip


def packed(format: str, group_size: int, n: int = N, k: int = K) -> Tensor:
    return testing.pack_weight(torch.randn(n, k), format, group_size)


def numbers(format: str, group_size: int, x_format: str, n: int = N, k: int = K) -> tuple[int, int, int, int, bool, int]:
    return n, k, _C.FORMATS[format], group_size, False, _C.X_FORMATS[x_format]


def regions(call: object, threads: int) -> int:
    with ambient(f"threads {threads}"):
        internals.forget_crowded_cores()  # by other workers of this run: small products would be the caller's alone
        before = _C.opened_regions()
        call()  # type: ignore[operator]
        return _C.opened_regions() - before


@pytest.mark.parametrize("of", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_opens_one_region(of: tuple[str, int, str], dtype: torch.dtype) -> None:
    """Few rows, whose preparation is too little for two threads; many; and more than a pass has."""
    format, group_size, x_format = of
    weight = packed(format, group_size)
    for rows in (1, 4, 40, 700, 1100):
        x = torch.randn(rows, K, dtype=dtype)
        run = lambda: torch.ops.lowbit.linear(x, weight, *numbers(format, group_size, x_format))  # noqa: B023, E731
        assert regions(run, 1) == 0
        assert regions(run, 2) == 1, rows


def test_a_product_that_is_too_small_for_two_threads_opens_none() -> None:
    weight = testing.pack_weight(torch.randn(16, 64), "int8")
    assert regions(lambda: torch.ops.lowbit.linear(torch.randn(4, 64), weight, 16, 64, _C.FORMATS["int8"], 0, False, 2), 2) == 0


@pytest.mark.parametrize("of", FORMATS, ids=str)
def test_gather_linear_opens_one_region(of: tuple[str, int, str]) -> None:
    format, group_size, x_format = of
    weight = packed(format, group_size).expand(6, -1, -1)
    for tokens in (1, 40, 700):
        x, index = torch.randn(tokens, K), torch.randint(0, 6, (tokens, 2))
        run = lambda: torch.ops.lowbit.gather_linear(x, weight, index, *numbers(format, group_size, x_format))  # noqa: B023, E731
        assert regions(run, 1) == 0
        assert regions(run, 2) == 1, tokens


@pytest.mark.parametrize("of", FORMATS, ids=str)
def test_experts_open_one_region(of: tuple[str, int, str]) -> None:
    format, group_size, x_format = of
    inner = N // 2
    gate_up, down = packed(format, group_size).expand(6, -1, -1), packed(format, group_size, K, inner).expand(6, -1, -1)
    for tokens in (1, 40, 700):
        x, index, weights = torch.randn(tokens, K), torch.randint(0, 7, (tokens, 2)), torch.rand(tokens, 2)
        index[0] = 0
        run = lambda: torch.ops.lowbit.experts(  # noqa: E731
            x, gate_up, down, index, weights,  # noqa: B023
            [int(number) for number in numbers(format, group_size, x_format)],
            [int(number) for number in numbers(format, group_size, x_format, K, inner)], 4,
        )  # fmt: skip
        assert regions(run, 1) == 0
        assert regions(run, 2) == 1, tokens
