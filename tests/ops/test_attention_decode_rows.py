# SPDX-License-Identifier: Apache-2.0
"""The rows of attention_forward that decode: few queries over many keys, what they refuse, and that they are taken unasked."""

from __future__ import annotations

import pytest
import torch
from row_fixture import fixture_of
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention

ROWS = [row for row in testing.rows("attention_forward") if "_decode_" in str(row["name"])]
row = fixture_of(ROWS)


def inputs(row: str, length: int = 2, keys: int = 700) -> list[Tensor]:
    dtype = getattr(torch, row.split("_")[3])
    shapes = (2, 4, length, 40), (2, 2, keys, 40), (2, 2, keys, 24)
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def wanted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    wide = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = q.double() @ next(wide).transpose(-1, -2) * 0.2
    return torch.softmax(scores if mask is None else scores + mask.double(), -1) @ next(wide)


@pytest.mark.core
def test_a_decode_row_computes_attention(row: str) -> None:
    q, k, v = inputs(row)
    mask = torch.randn(1, 4, 1, 700)
    with torch.no_grad(), lowbit.force_kernel(row):
        out, lse, _ = attention(q, k, v, scale=0.2, mask=mask)
    assert _C.last_kernel("attention_forward") == row and lse.isfinite().all()
    limit = 1e-5 if q.dtype == torch.float32 else 2.0**-7 if q.dtype == torch.bfloat16 else 2.0**-10
    assert (out.double() - wanted(q, k, v, mask)).abs().max() < limit


def test_a_decode_row_is_taken_for_few_queries_and_no_other(row: str, subtests: pytest.Subtests) -> None:
    with torch.no_grad():
        for length, decodes in ((8, True), (9, False)):  # two query heads a kv head: 16 rows
            with subtests.test(length=length):
                attention(*inputs(row, length), scale=0.2)
                assert ("_decode_" in _C.last_kernel("attention_forward")) == decodes


def test_few_queries_of_many_heads_over_one_kv_head_decode(row: str, subtests: pytest.Subtests) -> None:
    """Latent attention: all heads share keys and values, and a task has more than its usual number of rows."""
    dtype = getattr(torch, row.split("_")[3])
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for heads, length, decodes in ((20, 1, True), (64, 1, True), (130, 1, True), (20, 4, True), (20, 5, False)):
        q, latent = torch.randn(1, heads, length, 72).to(dtype), torch.randn(1, 1, 600, 72).to(dtype)
        v = latent[..., :64]
        with subtests.test(heads=heads, length=length), torch.no_grad():
            out, _, _ = attention(q, latent, v, scale=0.1)
            assert ("_decode_" in _C.last_kernel("attention_forward")) == decodes
            weights = torch.softmax(q.double() @ latent.double().transpose(-1, -2) * 0.1, -1)
            assert (out.double() - weights @ v.double()).abs().max() < limit


def test_a_decode_row_refuses_what_it_does_not_keep(row: str, subtests: pytest.Subtests) -> None:
    q, k, v = inputs(row)
    with torch.no_grad(), lowbit.force_kernel(row):
        for change in ({"want_max_scores": True}, {"dropout_p": 0.5}):
            with subtests.test(change=change), pytest.raises(NotImplementedError, match="are not kept by decode"):
                attention(q, k, v, scale=0.2, **change)
        with pytest.raises(NotImplementedError, match="not few queries"):
            attention(*inputs(row, 20), scale=0.2)
