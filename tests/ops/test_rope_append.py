# SPDX-License-Identifier: Apache-2.0
"""rope_append: every row against float64, what it writes and what it leaves, what it refuses, torch's checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from settings import forced
from torch import Tensor

from lowbit import testing
from lowbit.ops.rope_append import NEIGHBOURS, NEIGHBOURS_OF_HALVES, NEIGHBOURS_TO_HALVES, rope_append

ROWS = [str(row["name"]) for row in testing.rows("rope_append") if row["available"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


def rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, offset: float) -> tuple[Tensor, Tensor]:
    """[B, H, L, E] in float64, and the sum of the magnitudes that each element is made of."""
    x, cos, sin = x.double().transpose(1, 2), cos.double()[:, None], sin.double()[:, None]
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (offset + weight.double())
    columns = cos.shape[-1]
    head, rest = x[..., :columns], x[..., columns:]
    low, high = head.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    wanted = torch.cat([head * cos + turned * sin, rest], dim=-1)
    return wanted, torch.cat([(head * cos).abs() + (turned * sin).abs(), rest.abs()], dim=-1)


def allowed(wanted: Tensor, sizes: Tensor, dtype: torch.dtype, e: int) -> Tensor:
    """Three float32 roundings, those of a norm over e, and that of the result."""
    error = ((e + 8) / 2 + 8) * testing.ROUNDOFF["float32"] * sizes
    smallest = torch.finfo(dtype).smallest_normal
    return error + testing.ROUNDOFF[str(dtype).removeprefix("torch.")] * (wanted.abs() + error + smallest)


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "batch, length, heads, kv_heads, e, columns",
    [(1, 1, 9, 3, 64, 64), (2, 5, 4, 4, 24, 20), (3, 2, 2, 1, 7, 6), (2, 3, 3, 1, 80, 32), (1, 700, 8, 2, 64, 64)],
)
def test_every_row(
    row: str, dtype: torch.dtype, batch: int, length: int, heads: int, kv_heads: int, e: int, columns: int, subtests: pytest.Subtests
) -> None:
    """The last is large enough for several threads; with norms and without, one cos for all and one for each."""
    qkv = torch.randn(batch, length, heads + 2 * kv_heads, e).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    for weights, each in ((None, 1), ((torch.randn(e), torch.randn(e).bfloat16()), batch)):
        with subtests.test(norms=weights is not None):
            cos, sin = (torch.randn(each, length, columns).to(dtype) for _ in range(2))
            keys, values = torch.full((2, batch, kv_heads, length + 7, e), 3.0).to(dtype)
            norms = () if weights is None else (*weights, EPS, 1.0)
            with forced(row):
                query = rope_append(qkv, cos, sin, keys, values, 4, *norms)
            for got, of, weight in ((query, q, 0), (keys[:, :, 4 : 4 + length], k, 1)):
                wanted, sizes = rotated(of, cos, sin, weights and weights[weight], 1.0)
                testing.assert_within(got, wanted, allowed(wanted, sizes, dtype, e), what=row)
            assert torch.equal(values[:, :, 4 : 4 + length], v.transpose(1, 2))
            for states in (keys, values):
                assert (states[:, :, :4] == 3).all() and (states[:, :, 4 + length :] == 3).all()


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("e, columns", [(64, 64), (40, 36), (80, 6), (97, 96)])
def test_pairs_of_neighbours(row: str, dtype: torch.dtype, e: int, columns: int) -> None:
    """Beside halves of permuted columns, in float64."""
    pairs = torch.arange(columns).view(-1, 2).mT.flatten()  # 0, 2, .., 1, 3, ..
    rest = torch.arange(columns, e)
    for rotation in (NEIGHBOURS, NEIGHBOURS_OF_HALVES, NEIGHBOURS_TO_HALVES):
        q, cos, sin = torch.randn(2, 3, 4, e).to(dtype), *torch.randn(2, 2, 3, columns).to(dtype)
        with forced(row):
            got = rope_append(q, cos, sin, *q.new_empty(2, 2, 0, 3, e), 0, rotation=rotation)
        halves = [angles[..., : columns // 2].repeat(1, 1, 2) for angles in (cos, sin)]
        angles = [each[..., pairs] for each in (cos, sin)] if rotation == NEIGHBOURS else halves
        wanted, sizes = rotated(q[..., torch.cat([pairs, rest])], *angles, None, 0.0)
        if rotation != NEIGHBOURS_TO_HALVES:
            wanted, sizes = (each[..., torch.cat([pairs.argsort(), rest])] for each in (wanted, sizes))
        testing.assert_within(got, wanted, allowed(wanted, sizes, dtype, e), what=f"{row}, rotation {rotation}")


def test_strides_of_everything_and_no_tokens() -> None:
    qkv, cos, sin = torch.randn(2, 3, 8, 32), torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    keys, values = torch.zeros(2, 2, 2, 5, 32)
    wanted = rope_append(qkv, cos, sin, keys, values, 1)
    spread = torch.empty(2, 8, 3, 32).transpose(1, 2).copy_(qkv)
    room = torch.zeros(2, 5, 2, 64)
    others = room.transpose(1, 2).chunk(2, dim=-1)
    columns = (part.mT.contiguous().mT for part in (cos, sin))
    assert torch.equal(rope_append(spread, *columns, *others, 1), wanted)
    assert torch.equal(others[0], keys) and torch.equal(others[1], values)
    assert rope_append(qkv[:, :0], cos[:, :0], sin[:, :0], keys, values, 5).shape == (2, 4, 0, 32)


def arguments(**changed: Any) -> dict[str, Any]:
    keys, values = torch.zeros(2, 2, 2, 5, 8)
    given = {"qkv": torch.ones(2, 3, 8, 8), "cos": torch.ones(1, 3, 8), "sin": torch.ones(1, 3, 8), "keys": keys}
    return given | {"values": values, "start": 0} | changed


@pytest.mark.parametrize(
    "changed, error, text",
    [
        ({"qkv": torch.ones(2, 3, 64)}, ValueError, r"qkv must have shape \[B, L, Hq \+ 2 Hkv, E\], got \[2, 3, 64\]"),
        ({"qkv": torch.ones(2, 3, 8, 8).int()}, TypeError, "qkv must be float32, bfloat16 or float16, got int32"),
        ({"qkv": torch.ones(2, 3, 3, 8)}, ValueError, "qkv must have at least two heads for each of the 2 of keys, got 3"),
        ({"start": 3}, ValueError, "keys must have room for tokens 3 to 6, got 5"),
        ({"start": -1}, ValueError, "keys must have room for tokens -1 to 2, got 5"),
        ({"keys": torch.zeros(2, 2, 5, 8).half()}, TypeError, "keys must be float32, got float16"),
        ({"values": torch.zeros(2, 2, 5, 4)}, ValueError, r"values must have shape \[2, 2, 5, 8\], got \[2, 2, 5, 4\]"),
        ({"values": torch.zeros(2, 2, 8, 5).mT}, ValueError, "values must be dense in its last dimension, got stride 5"),
        ({"cos": torch.ones(3, 3, 8)}, ValueError, r"cos must have shape \[B or 1, L, R\], got \[3, 3, 8\]"),
        ({"sin": torch.ones(1, 3, 6)}, ValueError, r"sin must have shape \[1, 3, 8\], got \[1, 3, 6\]"),
        ({"cos": torch.ones(1, 3, 5), "sin": torch.ones(1, 3, 5)}, ValueError, "cos must have an even number of columns"),
        ({"q_weight": torch.ones(4)}, ValueError, r"q_weight must have shape \[8\], got \[4\]"),
        ({"k_weight": torch.ones(8), "eps": -1.0}, ValueError, "eps must be finite and not negative, got -1"),
        ({"rotation": 4}, ValueError, "rotation must be 0 to 3, got 4"),
        ({"gated": True, "qkv": torch.ones(2, 3, 7, 8)}, ValueError, "gated heads must be pairs of a query and its gate"),
        ({"gated": True, "grouped": True}, ValueError, "gated heads must be .* not grouped, got 8 heads with 4 keys and"),
        ({"qkv": torch.ones(2, 3, 8, 8).requires_grad_()}, NotImplementedError, "no argument may require a gradient"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_written(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    given = arguments(**changed)
    if "dense" in text:  # strides are not part of what a fake tensor is described by
        with pytest.raises(error, match=f"rope_append: {text}"):
            rope_append(**given)
    else:
        refused_alike(rope_append, given, error, f"rope_append: {text}")
    assert not given["keys"].any() and not given["values"].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in arguments().items()}
    norms = torch.ones(8), torch.ones(8), EPS, 0.0
    torch.library.opcheck(torch.ops.lowbit.rope_append_.default, (*given.values(), *norms))


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
def test_gates_between_queries_are_skipped(row: str) -> None:
    """The bits are those of the same heads without gates."""
    heads, kv_heads, length, e = 3, 2, 5, 24
    gated, cos, sin = torch.randn(2, length, 2 * heads + 2 * kv_heads, e), *torch.randn(2, 1, length, 16)
    plain = torch.cat([gated[:, :, : 2 * heads : 2], gated[:, :, 2 * heads :]], dim=2)
    results = []
    for qkv, is_gated in ((gated, True), (plain, False)):
        keys, values = torch.zeros(2, 2, kv_heads, length, e)
        with forced(row):
            query = rope_append(qkv, cos, sin, keys, values, 0, torch.ones(e), torch.ones(e), EPS, gated=is_gated)
        results.append((query, keys, values))
    assert all(map(torch.equal, *results))
