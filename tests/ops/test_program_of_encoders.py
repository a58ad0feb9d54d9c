# SPDX-License-Identifier: Apache-2.0
"""Steps of encoders in programs: attention without a cache, and of packed sequences, beside float64; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.ops.program import NONE, Program
from lowbit.ops.run_program import run_program

MISSING = torch.empty(0)
HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 24, 0.3
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE
LENGTHS = (7, 0, 140, 1, 20, 3, 33, 64, 2, 5)
"""More sequences than threads have tasks of, or the first of them alone."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-5}


def self_attention(qkv: Tensor, mask: Tensor = MISSING, ends: Tensor = MISSING) -> Tensor:
    program = Program()
    program.self_attention(Program.input(0), KV_HEADS, SIZE, SCALE, Program.input(1), Program.input(2))
    return run_program(program.code, [], [], [qkv, mask, ends], [])


def by_cache(qkv: Tensor, mask: Tensor = MISSING, ends: Tensor = MISSING) -> Tensor:
    """The same with keys and values in a cache, as behind a rotary embedding."""
    batch, length, _ = qkv.shape
    keys, values = qkv.new_empty(2, batch, KV_HEADS, length, SIZE).unbind()
    program, (k, v) = Program(), (Program.state(0), Program.state(1))
    query = program.rope_append(Program.input(0), NONE, NONE, k, v, 0)
    program.attention(query, k, v, 0, SCALE, Program.input(1), cu_seqlens=Program.input(2))
    return run_program(program.code, [], [keys, values], [qkv, mask, ends], [0])


def wanted(qkv: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[B, L, (Hq + 2 Hkv) E]`` in float64."""
    batch, length, _ = qkv.shape
    q, k, v = qkv.double().view(batch, length, -1, SIZE).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=SCALE)
    return out.transpose(1, 2).reshape(batch, length, -1)


def packed(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(1, sum(lengths), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    return qkv, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def each_alone(qkv: Tensor, lengths: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    parts = [part for part in qkv.split(list(lengths), dim=1) if part.shape[1]]
    masks = [None if mask is None else mask[..., : part.shape[1], : part.shape[1]] for part in parts]
    return torch.cat([wanted(part, its) for part, its in zip(parts, masks, strict=True)], dim=1)


@pytest.mark.parametrize("run", [self_attention, by_cache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 9, 70])
def test_of_all_tokens(run: Any, dtype: torch.dtype, length: int) -> None:
    qkv = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length)).to(dtype)
    got = run(qkv)
    assert got.shape == (2, length, HEADS * SIZE) and got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted(qkv), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(2)) < 0.7
    mask |= torch.eye(length, dtype=torch.bool)
    torch.testing.assert_close(run(qkv, mask).double(), wanted(qkv, mask), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("run", [self_attention, by_cache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:3], (50,)], ids=["many", "few", "one"])
def test_packed_sequences_see_themselves_alone(run: Any, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    qkv, ends = packed(lengths, dtype)
    torch.testing.assert_close(
        run(qkv, ends=ends).double(), each_alone(qkv, lengths), rtol=BOUNDS[dtype], atol=BOUNDS[dtype]
    )
    assert run(qkv, ends=ends.long()).equal(run(qkv, ends=ends))


@pytest.mark.parametrize("threads", [1, 3])
def test_packed_sequences_with_a_mask(threads: int) -> None:
    """The mask is that of each sequence, from its first token on; its bits do not depend on threads."""
    qkv, ends = packed(LENGTHS)
    band = torch.ones(140, 150, dtype=torch.bool).tril(5).triu(-5)[:, :140][None, None]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = self_attention(qkv, band, ends)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got.double(), each_alone(qkv, LENGTHS, band), rtol=1e-5, atol=1e-5)
    assert got.equal(self_attention(qkv, band, ends))


@pytest.mark.parametrize("run", [self_attention, by_cache])
def test_refused(run: Any) -> None:
    qkv, ends = packed((4, 6))
    for bad in ([1, 4, 10], [0, 4, 9], [0, 11, 10], [0]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 10 tokens of query"):
            run(qkv, ends=torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(TypeError, match="cu_seqlens must be int32 or int64, got float32"):
        run(qkv, ends=ends.float())
    with pytest.raises(ValueError, match=r"query must have shape \[1, Hq, T, E\] with cu_seqlens"):
        run(qkv.expand(2, -1, -1).contiguous(), ends=ends)
    with pytest.raises(ValueError, match="mask must have as many rows as the longest sequence has tokens, got 5 for 6"):
        run(qkv, torch.ones(1, 1, 5, 5, dtype=torch.bool), ends)
    with pytest.raises(ValueError, match=r"mask must have shape \[1, 4, 6, 6\], got \[1, 4, 6, 7\]"):
        run(qkv, torch.ones(1, 1, 6, 7, dtype=torch.bool), ends)


def test_columns_of_qkv() -> None:
    for kv_heads, size, text in ((4, 24, "and queries, got 192"), (2, 25, "got 192")):
        program = Program()
        program.self_attention(Program.input(0), kv_heads, size, SCALE)
        with pytest.raises(ValueError, match=text):
            run_program(program.code, [], [], [torch.randn(1, 3, WIDTH)], [])


def cross_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor = MISSING) -> Tensor:
    program = Program()
    program.cross_attention(Program.input(0), Program.state(0), Program.state(1), SCALE, Program.input(1))
    return run_program(program.code, [], [keys, values], [q, mask], [])


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_to_keys_of_an_encoder(tokens: int, dtype: torch.dtype) -> None:
    """Keys and values may be views, those of fewer heads, and of other sizes; all of them are seen, or those of a
    mask."""
    generator = torch.Generator().manual_seed(2)
    q, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in (
        (3, tokens, HEADS * SIZE), (3, KV_HEADS, 70, SIZE), (3, KV_HEADS, 70, 2 * SIZE),
    ))  # fmt: skip
    keys, values = keys[:, :, :61], values[:, :, :61]
    seen = torch.rand(3, 1, 1, 61, generator=generator) < 0.5
    for mask in (None, seen.expand(-1, -1, tokens, -1)):
        heads = q.double().view(3, tokens, HEADS, SIZE).transpose(1, 2)
        k, v = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        reference = torch.nn.functional.scaled_dot_product_attention(heads, k, v, mask, scale=SCALE)
        reference = reference.transpose(1, 2).reshape(3, tokens, -1)
        got = cross_attention(q, keys, values, MISSING if mask is None else mask)
        assert got.dtype == dtype and got.shape == reference.shape
        assert float((got.double() - reference).abs().max()) < BOUNDS[dtype] * float(reference.abs().max())


def test_attention_to_keys_of_an_encoder_is_refused() -> None:
    q, keys, values = torch.randn(2, 3, HEADS * SIZE), *torch.randn(2, 2, KV_HEADS, 9, SIZE)
    with pytest.raises(ValueError, match="the columns of q must be heads of E"):
        cross_attention(q[..., :-1].contiguous(), keys, values)
    with pytest.raises(ValueError, match="q must have three dimensions, keys and values four"):
        cross_attention(q, keys[0], values)
    with pytest.raises(ValueError, match="must have shape"):
        cross_attention(q, keys, values[:, :, :8])
    with pytest.raises(ValueError, match="must have shape"):
        cross_attention(q, keys, values, torch.ones(2, 1, 3, 8, dtype=torch.bool))
