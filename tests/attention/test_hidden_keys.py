# SPDX-License-Identifier: Apache-2.0
"""Keys that a mask hides from all queries, as the rest of a static cache: they are not read, in tiles of keys, and results and gradients are those of the keys that are left."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lowbit
from lowbit import testing
from lowbit.ops.attention import attention

ROWS = [str(row["name"]) for row in testing.rows("attention_forward") if row["available"]]
KEYS, TILE = 640, 256  # tiles are at most so long


def hiding(kind: str, length: int, shown: list[tuple[int, int]]) -> Tensor:
    """A mask [2, 4 or 1, length or 1, KEYS] by which batch b sees the keys from shown[b][0] to before shown[b][1]."""
    seen = torch.zeros(2, 1, 1, KEYS, dtype=torch.bool)
    for b, (begin, end) in enumerate(shown):
        seen[b, ..., begin:end] = True
    if kind == "padding":
        return seen
    if kind == "rows":  # the first query sees less at either end
        seen = seen.repeat(1, 4, length, 1)
        for b, (begin, end) in enumerate(shown):
            if end - begin > 40:
                seen[b, 1, 0, begin : begin + 20] = seen[b, 2, 0, end - 20 : end] = False
        return seen
    if kind == "strided":
        return seen.repeat_interleave(2, -1)[..., ::2]
    dtype = getattr(torch, kind)
    return torch.where(seen, torch.randn(2, 1, length, KEYS), -math.inf).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    term = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask.double()
    return (q.double() @ k.mT / 8 + term).softmax(-1).nan_to_num(0) @ v


KINDS = ("padding", "rows", "strided", "float32", "bfloat16", "float16")
SHOWN = (
    [(0, 65), (0, 64)], [(130, 300), (7, 8)], [(600, 640), (512, 601)], [(0, 640), (255, 257)], [(0, 0), (300, 310)]
)  # fmt: skip


def poisoned(x: Tensor, shown: list[tuple[int, int]]) -> Tensor:
    """x with nan in the tiles of keys of which nothing is shown."""
    x = x.clone()
    for b, (begin, end) in enumerate(shown):
        first = begin // TILE * TILE
        x[b, :, :first] = x[b, :, -(-end // TILE) * TILE if end > begin else first :] = torch.nan
    return x


@pytest.mark.parametrize("row", ROWS)
def test_they_are_not_read(row: str) -> None:
    name = next(name for name in ("bfloat16", "float16", "float64", "float32") if f"_{name}" in row)
    dtype, allowed = getattr(torch, name), 4e-5 + 8 * testing.ROUNDOFF.get(name, 0.0)
    served = 0
    for length, kind, shown in itertools.product((1, 3, 70), KINDS, SHOWN):
        q, k, v = (torch.randn(2, heads, n, 64).to(dtype) for heads, n in ((4, length), (2, KEYS), (2, KEYS)))
        mask = hiding(kind, length, shown)
        if mask.is_floating_point() and dtype in (torch.bfloat16, torch.float16):
            mask = mask.to(dtype)
        try:
            with lowbit.force_kernel(row):
                out = attention(q, k, v, scale=1 / 8, mask=mask)[0]
                again = attention(q, poisoned(k, shown), poisoned(v, shown), scale=1 / 8, mask=mask)[0]
        except NotImplementedError:
            continue
        served += 1
        assert (out - reference(q, k, v, mask)).abs().max() <= allowed, (length, kind, shown)
        assert kind == "strided" or torch.equal(again, out), (length, kind, shown)
    assert served >= len(KINDS) * len(SHOWN)


@pytest.mark.parametrize("kind", ["padding", "rows", "float32"])
@pytest.mark.parametrize("length", [3, 150])
def test_gradients_are_those_of_the_keys_that_are_left(kind: str, length: int) -> None:
    shown = [(140, 290), (500, 633)]
    mask = hiding(kind, length, shown)
    given = [torch.randn(2, heads, n, 64) for heads, n in ((4, length), (2, KEYS), (2, KEYS))]
    inputs = [*given, mask] if kind == "float32" else given
    ours, exact = [x.clone().requires_grad_() for x in inputs], [x.double().requires_grad_() for x in inputs]
    out = attention(*ours[:3], scale=1 / 8, mask=ours[3] if kind == "float32" else mask)[0]
    wanted = functional.scaled_dot_product_attention(
        *exact[:3], exact[3] if kind == "float32" else mask, scale=1 / 8, enable_gqa=True
    )
    grad = torch.randn(wanted.shape, dtype=torch.float64)
    out.backward(grad.float())
    wanted.backward(grad)
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max()
