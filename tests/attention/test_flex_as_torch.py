# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's own tests of flex_attention that no other file here has: paged caches, lists made by hand, options, devices, dynamic shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask

import lowbit
from lowbit import create_block_mask, flex_attention


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q.new_ones((), dtype=torch.bool)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k)


def qkv(batch: int, length: int, *, heads: int = 4, e: int = 16) -> list[Tensor]:
    return [torch.randn(batch, heads, length, e) for _ in range(3)]


@pytest.mark.parametrize("mask_mod", [causal, everything])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_paged_cache_of_torch(mask_mod: Callable[..., Tensor], compiled: bool) -> None:
    """Pages are reserved in turns, so that those of a batch entry lie scattered; one key cache of batch 1 serves all."""
    batch, length, page, pages = 3, 256, 64, 20
    q, k, v = qkv(batch, length)
    mask = create_block_mask(mask_mod, batch, 1, length, length, BLOCK_SIZE=page)
    cache = PagedAttention(pages, page, batch + 2, device="cpu")
    for reserved in (50, 130, 256):
        for entry in range(batch):
            cache.reserve(torch.tensor(entry), torch.tensor(reserved))
    stored = [torch.zeros(1, 4, pages * page, 16) for _ in range(2)]
    cache.assign(torch.arange(batch), torch.arange(length).expand(batch, length), k, v, *stored)
    lengths = torch.full((batch,), length)
    options = {"score_mod": cache.get_score_mod(relative, kv_len=lengths), "block_mask": cache.convert_logical_block_mask(mask, kv_len=lengths)}
    function = torch.compile(flex_attention, backend="aot_eager") if compiled else flex_attention
    torch.testing.assert_close(function(q, *stored, **options), flex_attention(q, k, v, relative, mask), atol=1e-5, rtol=1e-5)


def test_block_lists_made_by_hand_may_be_int64() -> None:
    blocks = 4
    mask = BlockMask.from_kv_blocks(
        (torch.arange(blocks) + 1)[None, None], torch.arange(blocks).expand(1, 1, blocks, blocks), BLOCK_SIZE=32, mask_mod=causal
    )
    inputs = qkv(2, 128)
    assert mask.kv_indices.dtype == torch.int64
    torch.testing.assert_close(flex_attention(*inputs, block_mask=mask), lowbit.scaled_dot_product_attention(*inputs, is_causal=True))


@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_with_a_block_mask_compile_once(dynamic: bool | None) -> None:
    """Once when all is dynamic, twice when Dynamo finds it out; the texts of errors must not ask for the numbers."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for batch, length in ((2, 512), (4, 256), (8, 384)):
        mask = create_block_mask(causal, None, None, length, length, BLOCK_SIZE=64)
        call = partial(flex_attention, score_mod=relative, block_mask=mask)
        inputs = qkv(batch, length)
        found = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)(*inputs)
        torch.testing.assert_close(found, call(*inputs), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == (1 if dynamic else 2)


def test_a_sliced_block_mask_with_its_own_mod() -> None:
    """One query at position 130 of a mask made for all."""
    q, (_, k, v) = torch.randn(2, 4, 1, 16), qkv(2, 256)
    whole = create_block_mask(causal, None, None, 256, 256)
    part = whole[:, :, 1]
    part.mask_mod = lambda b, h, i, j: causal(b, h, i + 130, j)
    part.seq_lengths = (1, 256)
    wanted = lowbit.scaled_dot_product_attention(q, k[:, :, :131], v[:, :, :131])
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=part), wanted)


@pytest.mark.parametrize("mod", [lambda s, b, h, q, k: 1 / s, lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s)])
def test_what_a_mod_makes_of_unused_scores_does_no_harm(mod: Callable[..., Tensor]) -> None:
    """The last tile reaches over the end: scores there are 0, 1 / 0 is inf, and log's branch has no derivative."""
    inputs = [tensor.requires_grad_() for tensor in qkv(1, 257)]
    out = flex_attention(*inputs, mod, create_block_mask(causal, None, None, 257, 257))
    grad_q, _, grad_v = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all() and grad_q.isfinite().all() and grad_v.isfinite().all()


def test_options_and_devices_are_checked_as_by_torch() -> None:
    q, k, v = qkv(1, 8)
    flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON", "BLOCK_M": 16})
    with pytest.raises(ValueError, match="Invalid BACKEND value 'CPU'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "CPU"})
    with pytest.raises(ValueError, match="Expected query, key, and value to have the same device type"):
        flex_attention(q, k.to("meta"), v)


def test_autocast_of_sdpa() -> None:
    q, k, v = qkv(1, 40)
    with torch.autocast("cpu", torch.bfloat16):
        found = lowbit.scaled_dot_product_attention(q.half(), k, v, torch.zeros(40, 40))
        wanted = torch.nn.functional.scaled_dot_product_attention(q.half(), k, v, torch.zeros(40, 40))
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


def test_autocast_leaves_a_causal_bias_and_bad_input_as_they_are() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 12, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = lowbit.scaled_dot_product_attention(q, k, k, causal_lower_right(8, 12))
        with pytest.raises(TypeError, match="key must be a tensor, got NoneType"):
            lowbit.flex_attention(q, None, k)
    wanted = lowbit.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), torch.ones(8, 12, dtype=torch.bool).tril(4))
    assert torch.equal(found, wanted)
