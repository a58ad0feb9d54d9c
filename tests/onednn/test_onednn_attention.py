# SPDX-License-Identifier: Apache-2.0
"""oneDNN's row of attention_forward: result and log-sum-exp against float64, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowbit
from lowbit import _C
from lowbit.ops.attention import attention

ROW = "attention_forward_graph_onednn"
FACTOR = {torch.float32: 3.0, torch.bfloat16: 1.1}  # of the error of torch's math path, as in tests/attention
SHAPES = ((1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3, 5), (1, 2, 2, 128, 128, 64, 64), (1, 6, 2, 130, 257, 40, 72), (2, 3, 3, 17, 300, 59, 16))
MASKS = {
    "none": lambda b, h, length, keys: None,
    "bool of keys": lambda b, h, length, keys: torch.rand(b, 1, 1, keys) > 0.3,
    "bool, a row sees nothing": lambda b, h, length, keys: (torch.rand(b, 1, length, keys) > 0.5) & (torch.arange(length)[:, None] != length // 2),
    "float": lambda b, h, length, keys: torch.randn(length, keys),
    "float of heads": lambda b, h, length, keys: torch.randn(1, h, length, keys),
    "float with -inf": lambda b, h, length, keys: torch.randn(b, h, length, keys).masked_fill(torch.rand(b, h, length, keys) > 0.7, -math.inf),
}


@pytest.fixture(params=FACTOR, ids=str)
def dtype(request: pytest.FixtureRequest, onednn: None) -> Iterator[torch.dtype]:
    q = torch.ones(1, 1, 4, 8, dtype=request.param)
    try:
        with lowbit.force_kernel(ROW):
            lowbit.scaled_dot_product_attention(q, q, q)
    except NotImplementedError as error:
        pytest.skip(str(error).splitlines()[-1].strip())
    yield request.param


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return p @ v.double().repeat_interleave(group, 1), lse


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> None:
    group, b, length = q.shape[1] // k.shape[1], q.shape[0], q.shape[2]
    wanted, wanted_lse = reference(q, k, v, mask, causal)
    with lowbit.force_kernel(ROW):
        out = lowbit.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
        wide = None if mask is None else mask.expand(b, q.shape[1], length, k.shape[2])
        lse = attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=wide, causal=causal)[1]
    assert _C.last_kernel("attention_forward") == ROW and out.dtype == q.dtype
    seen = mask if not causal else None
    both = causal and mask is not None
    with sdpa_kernel(SDPBackend.MATH):
        if both:
            hidden = torch.ones(length, k.shape[2]).tril() == 0
            seen = (mask & ~hidden) if mask.dtype == torch.bool else mask.float().masked_fill(hidden, -math.inf).to(mask.dtype)
        math_out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal and not both, enable_gqa=group > 1)
    of_math = (math_out.double() - wanted).nan_to_num(0.0).abs().max().item()
    eps = torch.finfo(q.dtype).eps
    assert (out.double() - wanted).abs().max().item() <= FACTOR[q.dtype] * of_math + eps * wanted.abs().max().item()
    assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
    shown = wanted_lse != -math.inf
    torch.testing.assert_close(lse.double()[shown], wanted_lse[shown], rtol=1e-5, atol=2e-5)


@pytest.mark.core(ROW)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_as_good_as_torchs(shape: tuple[int, ...], mask: str, dtype: torch.dtype) -> None:
    b, hq, hkv, length, keys, e, ev = shape
    q, k, v = (torch.randn(size).to(dtype) for size in ((b, hq, length, e), (b, hkv, keys, e), (b, hkv, keys, ev)))
    made = MASKS[mask](b, hq, length, keys)
    for causal in (False, True):
        check(q, k, v, made if made is None or made.dtype == torch.bool else made.to(dtype), causal)


def test_any_strides_and_masks_that_change_between_calls(dtype: torch.dtype) -> None:
    for heads_first, group in itertools.product((False, True), (1, 2)):
        q = torch.randn(2, 9, 4, 24).to(dtype).transpose(1, 2)
        k, v = (torch.randn(2, 4 // group, 11, 24).to(dtype)[:, :, :, :16] for _ in range(2))
        q = q[..., :16] if heads_first else q.contiguous()[..., :16]
        for _ in range(2):
            check(q, k, v, torch.rand(2, 1, 9, 11) > 0.4)


def test_what_it_has_not_is_refused_in_words(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 5, 8).to(dtype)
    for options, words in (({"dropout_p": 0.5}, "dropout"), ({"attn_mask": torch.zeros(5, 5, dtype=torch.float64)}, "a mask of float64|attn_mask")):
        with lowbit.force_kernel(ROW), pytest.raises((NotImplementedError, TypeError, ValueError), match=words):
            lowbit.scaled_dot_product_attention(q, q, q, **options)
    with lowbit.force_kernel(ROW), pytest.raises(NotImplementedError, match="mods and block masks"):
        lowbit.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2)
    with lowbit.force_kernel(ROW), pytest.raises(NotImplementedError, match="an expanded tensor"):
        lowbit.scaled_dot_product_attention(q, q[:, :1].expand(1, 2, 5, 8), q)


def test_gradients_are_for_our_own_rows(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 33, 16).to(dtype).requires_grad_()
    with lowbit.force_kernel(ROW), pytest.raises(NotImplementedError, match="the largest score of each row is wanted|another dtype"):
        lowbit.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("factor", [1e-20, 1e15])
def test_tiny_and_huge_scores(factor: float, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    check((q * factor).to(dtype), k.to(dtype), v.to(dtype), causal=True)


def test_what_is_not_finite_reaches_the_rows_that_see_it(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16).to(dtype) for _ in range(3))
    q[0, 0, 3, 2], v[0, 1, 7, 5] = torch.nan, torch.inf
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[12] = False
    wanted, _ = reference(q, k, v, mask, False)
    with lowbit.force_kernel(ROW):
        out = lowbit.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    seen = torch.arange(20) != 12
    assert torch.equal(out.isfinite()[:, :, seen], wanted.isfinite()[:, :, seen]) and not out[:, :, 12].any()
