# SPDX-License-Identifier: Apache-2.0
"""Masks of large finite values, as padding masks are: a row that they cover is the average that float64 makes of it, with its gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests import internals
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

MIN, MAX = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
VALUES = (MIN, MIN / 2, -1e38, -3e38, -1e30, -65504.0, -1e4, -2000.0, 2000.0, 1e4, 1e30, MAX)


def wanted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = False, sink: Tensor | None = None) -> list[Tensor]:
    """Of scores that are added to the mask in float32, as torch does it; the rest in float64."""
    real = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = real[0] @ real[1].transpose(-1, -2) / math.sqrt(q.shape[-1])
    rounded = (exact.detach().float() + mask).double()
    if causal:
        rounded = rounded.masked_fill(~torch.ones(rounded.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    scores = exact + (rounded - exact.detach())  # the values of one, the derivative of the other
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1)
    out = (p if sink is None else p[..., :-1]) @ real[2]
    torch.manual_seed(7)
    return [out, *torch.autograd.grad(out, real, torch.randn_like(out))]


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool = False, sink: Tensor | None = None) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, scale=1 / math.sqrt(q.shape[-1]), causal=causal, mask=mask, sink=sink)[0]
    torch.manual_seed(7)
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, dtype=torch.float64).to(out.dtype))]


def heads(length: int, kv_length: int) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(2, 2, n, 24) for n in (length, kv_length, kv_length)]


def masks(length: int, kv_length: int, value: float) -> dict[str, Tensor]:
    some = torch.where(torch.rand(length, kv_length) < 0.5, value, 0.0)
    some[length // 2] = value
    ladder = torch.tensor(VALUES)[torch.randint(len(VALUES), (length, kv_length))]
    return {"whole": torch.full((1, 1, 1, 1), value), "rows": some[None, None], "columns": some[:1, None, None], "ladder": ladder[None, None]}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("lengths", [(1, 5), (7, 300), (70, 150)], ids=str)
def test_a_row_of_one_large_value_is_the_average_of_what_it_sees(value: float, lengths: tuple[int, int], subtests: pytest.Subtests) -> None:
    tensors = heads(*lengths)
    for (name, mask), causal in itertools.product(masks(*lengths, value).items(), (False, True)):
        with subtests.test(name=name, causal=causal):
            results = zip(ours(*tensors, mask, causal), wanted(*tensors, mask, causal), strict=True)
            for what, (a, w) in zip(("out", "q", "k", "v"), results, strict=True):
                # where |s| is 2000 a score has 2^-13 left behind the point, in the float32 that it is rounded to
                assert (a.double() - w).abs().max() <= 3e-3 * max(1.0, w.abs().max().item()), (name, causal, what)


def test_every_row_averages_forward(any_forward_row: str) -> None:
    dtype = testing.attention_dtypes(any_forward_row)[0]
    q, k, v = (x.to(dtype) for x in heads(70, 300))
    out = attention(q, k, v, scale=0.2, mask=torch.full((1, 1, 70, 300), MIN), want_max_scores=True)[0]
    assert _C.last_kernel("attention_forward") == any_forward_row
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2.0**-8, "atol": 2.0**-12}
    torch.testing.assert_close(out.double(), v.double().mean(2, keepdim=True).expand_as(out), **tolerance)


def test_every_row_averages_backward(any_backward_row: str) -> None:
    dtype = testing.attention_dtypes(any_backward_row)[0]
    q, k, v = (x.to(dtype).requires_grad_() for x in heads(70, 300))
    out = attention(q, k, v, scale=0.2, mask=torch.full((1, 1, 70, 300), MIN))[0]
    grad = torch.autograd.grad(out, v, torch.ones_like(out))[0]
    assert _C.last_kernel("attention_backward") == any_backward_row
    torch.testing.assert_close(grad, torch.full_like(grad, 70 / 300), rtol=1e-5 if dtype == torch.float32 else 2.0**-7, atol=1e-6)


@pytest.mark.parametrize("kind", [str(row["name"]) for row in testing.rows("decode") if row["available"]])
def test_every_row_averages_in_a_step(kind: str) -> None:
    prompt = "_prompt_" in kind
    length, format = (70, "int8") if prompt else (2, kind.split("_")[1])
    dtype = getattr(torch, kind.split("_")[2]) if prompt else torch.float32
    k, v, q = torch.randn(1, 2, 600, 64), torch.randn(1, 2, 600, 64), torch.randn(1, 4, length, 64).to(dtype)
    mask = torch.full((1, 4, length, 600), MIN)
    out = torch.empty(1, 4, length, 64, dtype=dtype)
    scales: list[Tensor | None] = [None, None]
    for i, x in enumerate((k, v)):
        if "int" in format:
            codes = torch.empty(1, 2, 600, 32 if format == "int4" else 64, dtype=torch.uint8 if format == "int4" else torch.int8)
            scale = torch.empty(1, 2, 600, 2 if format == "int4" else 1)
            torch.ops.lowbit.kv_quantize_(x, codes, scale, False)
            torch.ops.lowbit.kv_dequantize_(codes, scale, x, False)
            k, v = (codes, v) if i == 0 else (k, codes)
            scales[i] = scale
            mean = x.mean(2)
        else:
            stored = x.to(getattr(torch, format))
            k, v = (stored, v) if i == 0 else (k, stored)
            mean = v.float().mean(2)
    with lowbit.force_kernel(kind):
        internals.decode(q, k, v, out, 0.1, *scales, mask=mask)
    assert _C.last_kernel("decode") == kind
    wanted, close = mean.repeat_interleave(2, 1)[:, :, None].expand(out.shape), 1e-3 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(out.float(), wanted, rtol=close, atol=1e-3)


@pytest.mark.parametrize("lengths", ((1, 40), (70, 150)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_smallest_number_of_every_dtype(dtype: torch.dtype, lengths: tuple[int, int]) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in heads(*lengths))
    mask = torch.full(lengths, torch.finfo(dtype).min, dtype=dtype)
    out = lowbit.scaled_dot_product_attention(q * 0.01, k, v, mask)
    grad = torch.autograd.grad(out, v, torch.ones_like(out))[0]
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=0.02, atol=0.02)
    torch.testing.assert_close(grad, torch.full_like(grad, lengths[0] / lengths[1]), rtol=0.05, atol=0)


def test_with_a_sink(subtests: pytest.Subtests) -> None:
    tensors = heads(70, 150)
    for value, sink in itertools.product((MIN, -1e4, -2000.0), (torch.tensor([0.5, -3000.0]), torch.tensor([-1e4, MIN]))):
        with subtests.test(value=value, sink=sink.tolist()):
            mask = torch.full((1, 1, 70, 1), value)
            for a, w in zip(ours(*tensors, mask, sink=sink), wanted(*tensors, mask, sink=sink), strict=True):
                assert (a.double() - w).abs().max() <= 3e-3, (value, sink)


def test_sums_that_overflow_are_hidden_and_not_nan() -> None:
    """torch: finfo.min + a large negative score is -inf, and a row of nothing but that is 0."""
    q, k, v = torch.full((1, 1, 2, 8), 1e19), torch.full((1, 1, 3, 8), -1e19), torch.randn(1, 1, 3, 8)
    k[0, 0, 1] = 0
    mask = torch.full((2, 3), MIN)
    out = lowbit.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, v[:, :, 1:2].expand_as(out))
    k[0, 0, 1] = -1e19
    assert not lowbit.scaled_dot_product_attention(q, k, v, mask).any()


def test_flex_with_where_and_its_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in heads(70, 150))

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= 1, score, MIN)

    out = lowbit.flex_attention(q, k, v, mod)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / math.sqrt(24)
    expected = torch.where(torch.arange(70)[:, None] >= 1, scores, MIN).softmax(-1) @ wide[2]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for a, w in zip(grads, torch.autograd.grad(expected, wide, torch.ones_like(expected)), strict=True):
        torch.testing.assert_close(a.double(), w, rtol=1e-4, atol=1e-5)


def test_a_bias_program_of_the_smallest_number() -> None:
    p = ProgramBuilder()
    program = p.finish(p.op("add", p.op("score"), p.constant(MIN)))
    q, k, v = heads(7, 40)
    out = attention(q, k, v, scale=0.2, score_mod=program)[0]
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("length", [1, 80])
def test_the_quantized_cache(format: str, length: int) -> None:
    cache = lowbit.QuantizedKVCache(format)
    cache.append(0, torch.randn(1, 2, 600, 64), torch.randn(1, 2, 600, 64))
    out = cache.attend(0, torch.randn(1, 4, length, 64), causal=False, mask=torch.full((1, 1, 1, 1), MIN))
    mean = cache.layers[0].values().mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(out, mean.expand_as(out), rtol=1e-3, atol=1e-3)


def test_the_gradient_of_a_mask_and_twice() -> None:
    q, k, v = (x.double().requires_grad_() for x in heads(3, 5))
    mask = torch.zeros(3, 5, dtype=torch.float64)
    mask[1] = torch.finfo(torch.float64).min
    mask.requires_grad_()
    out = lowbit.scaled_dot_product_attention(q, k, v, mask)
    expected = (q @ k.transpose(-1, -2) / math.sqrt(24) + mask).softmax(-1) @ v
    for a, w in zip(torch.autograd.grad(out.sum(), (q, k, v, mask)), torch.autograd.grad(expected.sum(), (q, k, v, mask)), strict=True):
        torch.testing.assert_close(a, w)
