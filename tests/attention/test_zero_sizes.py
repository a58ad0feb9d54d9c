# SPDX-License-Identifier: Apache-2.0
"""Every size of attention may be 0: forward, backward, a step over codes, the cache; what torch gives where torch takes it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import lowbit
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

SIZES = list(itertools.product((0, 2), (0, 4), (0, 2), (0, 3), (0, 5)))  # B, Hq, Hkv, L, S


def tensors(b: int, h: int, hkv: int, length: int, kv_length: int, e: int = 8, ev: int = 8) -> list[Tensor]:
    return [torch.randn(b, n, size, d, requires_grad=True) for n, size, d in ((h, length, e), (hkv, kv_length, e), (hkv, kv_length, ev))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forward_and_backward(sizes: tuple[int, ...], subtests: pytest.Subtests) -> None:
    b, h, hkv, length, kv_length = sizes
    if h and not hkv:
        with pytest.raises(ValueError, match="heads of q"):
            attention(*tensors(*sizes), scale=1.0)
        return
    for causal, with_sink, mask_shape in itertools.product((False, True), (False, True), (None, (1, 1, 1, 1), (1, 1, length, kv_length))):
        with subtests.test(causal=causal, with_sink=with_sink, mask_shape=mask_shape):
            q, k, v = tensors(*sizes)
            mask = None if mask_shape is None else torch.randn(mask_shape, requires_grad=True)
            sink = torch.randn(h, requires_grad=True) if with_sink else None
            out, lse, _ = attention(q, k, v, scale=1.0, causal=causal, mask=mask, sink=sink)
            assert out.shape == (b, h, length, 8) and lse.shape == (b, h, length)
            inputs = [x for x in (q, k, v, mask, sink) if x is not None]
            grads = torch.autograd.grad((out.sum(), lse.sum()) if kv_length or with_sink else out.sum(), inputs)
            for x, grad in zip(inputs, grads, strict=True):
                assert grad.shape == x.shape and grad.isfinite().all()
                if out.numel() == 0:
                    assert not grad.any()  # also where its memory was not: nothing looks at the keys
            again = torch.autograd.grad(attention(q, k, v, scale=1.0, causal=causal, mask=mask, sink=sink)[0].sum(), inputs, create_graph=True)
            assert all(grad.shape == x.shape for x, grad in zip(inputs, again, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 2, 3, 5), (2, 0, 0, 4, 4), (2, 0, 4, 4, 4), (2, 2, 2, 0, 5), (2, 2, 2, 3, 0)], ids=str)
def test_gradients_of_captured_tensors(sizes: tuple[int, ...]) -> None:
    p = ProgramBuilder()
    program = p.finish(p.op("add", p.op("score"), p.gather(p.captured("float", 1), p.op("k"))))
    table = torch.randn(sizes[4], requires_grad=True)
    out = attention(*tensors(*sizes), scale=1.0, score_mod=program, score_captured=[table])[0]
    grad = torch.autograd.grad(out.sum(), table)[0]
    assert grad.shape == table.shape and not grad.any()


AS_TORCH = [(2, 0, 0, 4, 8), (2, 0, 4, 4, 8), (0, 2, 2, 4, 4), (2, 2, 2, 0, 4), (2, 2, 2, 4, 0)]


@pytest.mark.parametrize(
    "sizes, gqa", [(sizes, gqa) for gqa in (False, True) for sizes in AS_TORCH if gqa or sizes[1] == sizes[2]], ids=str
)
def test_as_torch(sizes: tuple[int, ...], gqa: bool, subtests: pytest.Subtests) -> None:
    for mask in (None, torch.randn(1, 1, sizes[3], sizes[4])):
        with subtests.test(masked=mask is not None):
            ours, theirs = (function(*tensors(*sizes), mask, enable_gqa=gqa) for function in (lowbit.scaled_dot_product_attention, F.scaled_dot_product_attention))
            assert ours.shape == theirs.shape
            ours.sum().backward()


EMPTY = [(0, 2, 2, 3, 5), (2, 0, 0, 3, 5), (2, 2, 2, 0, 5), (2, 2, 2, 3, 0), (2, 2, 2, 0, 0)]


@pytest.mark.filterwarnings("ignore:.*runs through torch")
@pytest.mark.parametrize("mask", ["none", "program", "captures", "through torch"])
@pytest.mark.parametrize("score", ["none", "program", "captures", "through torch", "captures through torch"])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_flex_with_any_mods(sizes: tuple[int, ...], score: str, mask: str, subtests: pytest.Subtests) -> None:
    """The results of torch's ops with no score: zeros, lse of the sink alone."""
    b, h, _, length, kv_length = sizes
    table = torch.randn(h, length, kv_length, requires_grad=True)
    score_mod = {
        "none": None, "program": lambda s, b, h, i, j: s * 2, "captures": lambda s, b, h, i, j: s + table[h, i, j],
        "through torch": lambda s, b, h, i, j: torch.special.bessel_j0(s),
        "captures through torch": lambda s, b, h, i, j: torch.special.erfcx(s) + table[h, i, j],
    }[score]  # fmt: skip
    mask_mod = {
        "none": None, "program": lambda b, h, i, j: i >= j, "captures": lambda b, h, i, j: table.detach()[h, i, j] > 0,
        "through torch": lambda b, h, i, j: torch.special.bessel_j0((i - j) * 0.1) > table.detach()[h, i, j],
    }[mask]  # fmt: skip
    made = None if mask_mod is None else lowbit.create_block_mask(mask_mod, b, h, length, kv_length)
    if made is not None:
        wanted = torch_create_block_mask(lambda b, h, i, j: i >= j, b, h, length, kv_length, "cpu")
        assert made.kv_num_blocks.shape == wanted.kv_num_blocks.shape and made.kv_indices.shape == wanted.kv_indices.shape
    for sink in (None, torch.randn(h, requires_grad=True)):
        with subtests.test(with_sink=sink is not None):
            q, k, v = tensors(*sizes)
            out, aux = lowbit.flex_attention(q, k, v, score_mod, made, return_aux=lowbit.AuxRequest(lse=True, max_scores=True), sink=sink)
            assert out.shape == (b, h, length, 8) and not out.any()
            lse = torch.full((b, h, length), -torch.inf) if sink is None else sink.detach()[:, None].expand(b, h, length)
            torch.testing.assert_close(aux.lse.detach(), lse)
            assert torch.equal(aux.max_scores, torch.full_like(lse, -torch.inf))
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, (q, k, v), strict=True))


@pytest.mark.parametrize("e,ev", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_head_dimension_0(e: int, ev: int, masked: bool) -> None:
    mask = torch.randn(3, 5) if masked else None
    torch.manual_seed(0)
    q, k, v = tensors(2, 4, 4, 3, 5, e, ev)
    ours, theirs = (function(q, k, v, mask) for function in (lowbit.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (ours, theirs)]
    for a, w in zip(*grads, strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [s for s in SIZES if not (s[1] and not s[2])], ids=str)
def test_the_cache(format: str, sizes: tuple[int, ...]) -> None:
    b, h, hkv, length, kv_length = sizes
    q, k, v = (x.detach() for x in tensors(*sizes))
    cache = lowbit.QuantizedKVCache(format)
    cache.append(0, k, v)
    cache.append(0, k[:, :, :0], v[:, :, :0])
    for causal in (False, True):
        out = cache.attend(0, q, causal=causal, mask=torch.zeros(1, 1, 1, 1))
        assert out.shape == (b, h, length, 8) and out.isfinite().all()
    assert cache.layers[0].keys().shape == (b, hkv, kv_length, 8)
    assert cache.attend(0, torch.randn(b, h, 100, 8)).shape == (b, h, 100, 8)
    cache.crop(0)
    cache.reorder(torch.zeros(3 if b else 0, dtype=torch.int64))
