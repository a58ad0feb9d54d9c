# SPDX-License-Identifier: Apache-2.0
"""embedding: every row gives the rows of the decoded weight, from every layout; what it refuses, with data and without;
torch's checks of the registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.reference.quantize import QuantizedWeight

ROWS = [str(row["name"]) for row in testing.rows("dequantize") if row["available"] and "_rows_" in str(row["name"])]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [case[:3] for case in testing.format_cases() if case[3] == "float" and case[1] in (0, 16, 32, 128)]
N = 37


def embedding(weight: Tensor, indices: Tensor, dtype: torch.dtype, case: tuple[str, int, str], k: int, layout: str) -> Tensor:
    format, group_size, mapping = case
    return torch.ops.lowbit.embedding(
        weight, indices, torch.empty(0, dtype=dtype), N, k, _C.FORMATS[format], group_size, mapping == "asymmetric",
        _C.LAYOUTS[layout],
    )  # fmt: skip


@pytest.mark.core(*ROWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_rows_of_the_decoded_weight(case: tuple[str, int, str], subtests: pytest.Subtests) -> None:
    """Scale, zero point and the products of both are three roundings of float32; storing is one of the dtype."""
    format, group_size, mapping = case
    for i, k in enumerate((1, 15, 16, 17, 70, 300)):
        panels = testing.pack_weight(torch.randn(N, k), format, group_size, mapping)
        decoded = testing.decode_weight(panels, N, k, format, group_size, mapping)
        wanted = decoded.decode() if isinstance(decoded, QuantizedWeight) else decoded.double()
        indices = torch.randint(0, N, (3, 4)) if k < 300 else torch.randint(0, N, (4000,))
        for j, layout in enumerate(_C.LAYOUTS):
            weight = testing.repack(panels, _C.LAYOUT, layout, N, k, format, group_size, mapping == "asymmetric")
            dtype = DTYPES[(CASES.index(case) + i + j) % 3]  # by turns: three cases have all of them for each k and layout
            error = (4 * 2.0**-24 + testing.ROUNDOFF[str(dtype).removeprefix("torch.")]) * wanted[indices].abs()
            allowed = error + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            for row in ROWS:
                with subtests.test(k=k, layout=layout, row=row):
                    with lowbit.force_kernel(row):
                        y = embedding(weight, indices, dtype, case, k, layout)
                    testing.assert_within(y, wanted[indices], allowed, what=f"{row} {layout} {dtype}")
                    assert y.dtype == dtype and _C.last_kernel("dequantize") == row


def test_any_shape_any_strides_both_dtypes_of_indices_and_none(subtests: pytest.Subtests) -> None:
    case, k = ("int8", 32, "symmetric"), 40
    weight = testing.repack(testing.pack_weight(torch.randn(N, k), *case), _C.LAYOUT, "row-major", N, k, *case[:2])
    table = embedding(weight, torch.arange(N), torch.float32, case, k, "row-major")
    indices = torch.randint(0, N, (5, 4, 6))
    for given in (indices, indices.int(), indices.mT, indices[::2], indices[0, 0, 0], indices[:, :0], indices[:, 2, 1]):
        with subtests.test(shape=tuple(given.shape), strides=given.stride(), dtype=given.dtype):
            y = embedding(weight, given, torch.float32, case, k, "row-major")
            assert torch.equal(y, table[given.long()]) and y.is_contiguous()


@pytest.mark.parametrize("bad", [-1, N, 2**40, -(2**63)])
@pytest.mark.parametrize("count", [1, 5000])
def test_an_index_that_is_not_one_of_the_rows_is_an_index_error(bad: int, count: int) -> None:
    case, k = ("int4", 0, "symmetric"), 64
    weight = testing.repack(testing.pack_weight(torch.randn(N, k), *case), _C.LAYOUT, "row-major", N, k, *case[:2])
    indices = torch.zeros(count, dtype=torch.int64)
    indices[count // 2] = bad
    with pytest.raises(IndexError, match=rf"indices must be 0..36, got another one at index {count // 2} of \[{count}\]"):
        embedding(weight, indices, torch.float32, case, k, "row-major")


GOOD: dict[str, Any] = {
    "weight": testing.empty_packed(N, 40, "int8", 32, layout="row-major"), "indices": torch.zeros(3, dtype=torch.int64), "like": torch.empty(0),
    "n": N, "k": 40, "format": _C.FORMATS["int8"], "group_size": 32, "asymmetric": False, "layout": _C.LAYOUTS["row-major"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"weight": GOOD["weight"].int()}, TypeError, "weight must be packed uint8, got int32"),
        ({"weight": GOOD["weight"][:-1]}, ValueError, r"weight must have the packed shape \[37, \d+\] of int8 in row-major, got"),
        ({"layout": 0}, ValueError, r"weight must have the packed shape \[3, \d+\] of int8 in x86-panel-16x64, got"),
        ({"layout": 7}, ValueError, r"layout must be 0\.\.1, got layout=7"),
        ({"indices": torch.zeros(3)}, TypeError, "indices must be int32 or int64, got float32"),
        ({"indices": torch.zeros((1,) * 8, dtype=torch.int32)}, ValueError, "indices must have fewer than 8 dimensions"),
        ({"like": torch.empty(0, dtype=torch.float64)}, TypeError, "the result must be float32, bfloat16 or float16, got float64"),
        ({"group_size": 16}, ValueError, r"group_size must be 32, 64, 128, 256 or 0 \(per channel\), got group_size=16"),
        ({"format": 99}, ValueError, r"format must be 0\.\.\d+, got format=99"),
    ],
)
def test_a_bad_argument_is_named_with_data_and_without(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(torch.ops.lowbit.embedding, GOOD | changes, error, f"embedding: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    arguments = {**GOOD, "like": torch.empty(0, dtype=dtype), "indices": torch.zeros(4, 3, dtype=torch.int32).mT}
    torch.library.opcheck(torch.ops.lowbit.embedding.default, tuple(arguments.values()))
