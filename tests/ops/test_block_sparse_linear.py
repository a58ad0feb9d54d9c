# SPDX-License-Identifier: Apache-2.0
"""block_sparse_linear: every row against float64, its gradients against the dense ones, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.block_sparse_linear import block_sparse_linear, blocks_of, dense_of_blocks

ROWS = [str(row["name"]) for row in testing.rows("block_sparse_linear") if row["available"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
op = torch.ops.lowbit.block_sparse_linear

Blocks = tuple[Tensor, Tensor, Tensor]


def blocks(rows: int, columns: int, size: int, dtype: torch.dtype, share: float = 0.4) -> Blocks:
    """Random blocks of a weight; the first row of blocks has none, the last has all."""
    kept = torch.rand(rows, columns) < share
    kept[0], kept[-1] = False, True
    crow_indices = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    values = torch.randn(int(kept.sum()), size, size) * torch.logspace(-2, 1, size)[:, None]
    return values.to(dtype), crow_indices, kept.nonzero()[:, 1].int()


def within(y: Tensor, x: Tensor, of: Blocks, bias: Tensor | None, what: str) -> None:
    """Against float64: k + 1 roundings of the sum of absolute terms, in any order, and the one to the dtype of y."""
    weight = dense_of_blocks(*of, x.shape[-1]).double()
    offset = 0 if bias is None else bias.double()
    wanted, sizes = x.double() @ weight.T + offset, x.double().abs() @ weight.abs().T
    allowed = (x.shape[-1] + 1) * testing.ROUNDOFF["float32"] * (sizes + abs(offset))
    name = str(y.dtype).removeprefix("torch.")
    rounding = testing.ROUNDOFF[name] * (wanted.abs() + allowed + torch.finfo(y.dtype).smallest_normal)
    testing.assert_within(y, wanted, allowed + rounding, what=what)


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128])
def test_every_row_is_within_the_roundings_of_its_sums(row: str, dtype: torch.dtype, size: int) -> None:
    """Few rows, part of a vector of rows, more than one pass; large enough for threads from 64 on."""
    of = blocks(4, 5, size, dtype)
    served = 0
    for m in (1, 2, 3, 5, 8, 9, 16, 17, 31, 270):
        x = (torch.randn(m, 5 * size) * torch.logspace(-2, 1, m)[:, None]).to(dtype)
        for bias in (None, torch.randn(4 * size)):
            try:
                with lowbit.force_kernel(row):
                    y = block_sparse_linear(x, *of, bias)
            except NotImplementedError:
                continue
            served += 1
            assert _C.last_kernel("block_sparse_linear") == row and y.dtype == dtype
            within(y, x, of, bias, f"{row} m={m}")
    if "amx" not in row and "avx512_bf16" not in row:
        assert served == 20
    else:  # from 3 rows on, or from 8
        assert served >= 12 if dtype == torch.bfloat16 and size % 32 == 0 else served == 0


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("m", [3, 40])
def test_what_is_not_finite_meets_stored_blocks_alone(row: str, m: int) -> None:
    values, dtype = torch.randn(1, 32, 32), torch.bfloat16
    of = values.to(dtype), torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    x = torch.randn(m, 96, dtype=dtype)
    x[0, 5], x[1, 40], x[2, 95] = torch.inf, torch.nan, -torch.inf
    if "avx512_bf16" in row and m == 3:
        return  # too few rows for it
    with forced(row):
        y = block_sparse_linear(x, *of)
    assert y[1, :32].isnan().all() and y[1, 32:].eq(0).all()
    assert y[0].isfinite().all() and y[2:].isfinite().all() and y[:, 32:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_any_rank_no_blocks_and_no_rows(dtype: torch.dtype) -> None:
    of = blocks(3, 4, 16, dtype)
    x = torch.randn(2, 64, 5, dtype=dtype).mT
    y = block_sparse_linear(x, *of)
    assert y.shape == (2, 5, 48) and y.is_contiguous() and y.equal(block_sparse_linear(x.contiguous(), *of))
    within(block_sparse_linear(x[0, 0], *of)[None], x[0, :1], of, None, "one row")
    assert block_sparse_linear(x[:0], *of).shape == (0, 5, 48)
    none = of[0][:0], torch.zeros(4, dtype=torch.int32), of[2][:0]
    bias = torch.randn(48)
    assert block_sparse_linear(x, *none, bias).equal(bias.to(dtype).expand(2, 5, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_dense_weight(dtype: torch.dtype) -> None:
    values, *indices = blocks(3, 4, 32, dtype)
    x, bias = torch.randn(2, 5, 128, dtype=dtype), torch.randn(96, dtype=dtype)
    ours = [tensor.clone().requires_grad_() for tensor in (x, values, bias)]
    dense = [tensor.float().requires_grad_() for tensor in (x, values, bias)]
    grad = torch.randn(2, 5, 96, dtype=dtype)
    block_sparse_linear(ours[0], ours[1], *indices, ours[2]).backward(grad)
    weight = dense_of_blocks(dense[1], *indices, 128)
    torch.nn.functional.linear(dense[0], weight, dense[2]).backward(grad.float())
    for mine, wanted in zip(ours, dense, strict=True):
        assert mine.grad.dtype == dtype
        size = wanted.grad.abs().max()
        assert (mine.grad - wanted.grad).abs().max() <= size * (1e-5 if dtype == torch.float32 else 2**-6)
    frozen = block_sparse_linear(x, ours[1].detach(), *indices, ours[2])
    frozen.sum().backward()  # of the bias alone


def test_blocks_and_the_dense_weight_are_two_views_of_one() -> None:
    weight = torch.randn(48, 64)
    of = blocks_of(weight, 16).flatten(0, 1), torch.arange(0, 13, 4).int(), torch.arange(4).repeat(3).int()
    assert dense_of_blocks(*of, 64).equal(weight)


def test_autocast_takes_its_dtype_and_forward_mode_is_refused() -> None:
    of = blocks(2, 2, 32, torch.float32)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block_sparse_linear(x, *of)
    assert y.equal(block_sparse_linear(x.bfloat16(), of[0].bfloat16(), *of[1:]))
    with pytest.raises(NotImplementedError, match="block_sparse_linear"):
        torch.func.jvp(lambda x: block_sparse_linear(x, *of), (x,), (x,))


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 64).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 60)}, ValueError, r"x must have shape \[..., k\] with k a multiple of the blocks' size, 32"),
    ({"x": torch.randn(2, 0)}, ValueError, r"x must have shape \[..., k\]"),
    ({"x": torch.randn(2, 64).bfloat16()}, TypeError, "values must be bfloat16, got float32"),
    ({"values": torch.randn(2, 32, 16)}, ValueError, r"values must have shape \[blocks, size, size\]"),
    ({"values": torch.randn(2, 24, 24)}, ValueError, "the size of a block must be a multiple of 16, got 24"),
    ({"values": torch.randn(3, 32, 32)}, ValueError, r"col_indices must have shape \[3\], got \[2\]"),
    ({"crow_indices": torch.zeros(0, dtype=torch.int32)}, ValueError, r"crow_indices must have shape \[n / size"),
    ({"crow_indices": torch.zeros(3, dtype=torch.int64)}, TypeError, "crow_indices must be int32, got int64"),
    ({"col_indices": torch.zeros(2)}, TypeError, "col_indices must be int32, got float32"),
    ({"bias": torch.randn(63)}, ValueError, r"bias must have shape \[64\], got \[63\]"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {
        "x": torch.randn(2, 64),
        "values": torch.randn(2, 32, 32),
        "crow_indices": torch.tensor([0, 1, 2], dtype=torch.int32),
        "col_indices": torch.tensor([0, 1], dtype=torch.int32),
        "bias": None,
    }
    refused_alike(op, good | change, error, f"block_sparse_linear: {text}")


def test_torchs_checks_of_the_registration() -> None:
    for dtype in DTYPES:
        of = blocks(2, 3, 16, dtype)
        torch.library.opcheck(op.default, (torch.randn(48, 4, dtype=dtype).T, *of, torch.randn(32)))
