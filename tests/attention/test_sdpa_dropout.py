# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention probabilities: which ones depends on the seed and their place alone, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lowbit

sdpa = lowbit.scaled_dot_product_attention


def kept_of(q: Tensor, k: Tensor, p: float, seed: int, **options: object) -> Tensor:
    """The factors 0 or 1 / (1 - p) that seed gives: attention with an identity as values shows the probabilities themselves."""
    torch.manual_seed(seed)
    identity = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    dropped = sdpa(q, k, identity, dropout_p=p, **options)
    return dropped / sdpa(q, k, identity, **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_each_probability_is_dropped_or_scaled(p: float) -> None:
    q, k = torch.randn(2, 3, 70, 8) * 0.1, torch.randn(2, 3, 257, 8) * 0.1
    kept = kept_of(q, k, p, 1)
    is_kept = kept > 0
    torch.testing.assert_close(kept[is_kept], torch.full_like(kept[is_kept], 1 / (1 - p)), rtol=1e-5, atol=0)
    count = kept.numel()
    assert abs(is_kept.sum().item() - (1 - p) * count) < 5 * math.sqrt(p * (1 - p) * count)  # five standard deviations
    for dim in range(4):  # no dimension repeats the pattern of another
        other = is_kept.roll(1, dim)
        assert abs((is_kept == other).double().mean().item() - (p * p + (1 - p) ** 2)) < 0.02


def test_the_seed_is_torchs_generator() -> None:
    q, k, v = torch.randn(1, 2, 60, 16), torch.randn(1, 2, 60, 16), torch.randn(1, 2, 60, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(sdpa(q, k, v, dropout_p=0.2))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert not torch.equal(sdpa(q, k, v, dropout_p=0.2), results[2])


def test_causality_cuts_but_does_not_move_the_pattern() -> None:
    q, k = torch.randn(1, 1, 200, 8) * 0.1, torch.randn(1, 1, 200, 8) * 0.1
    full, causal = kept_of(q, k, 0.4, 3), kept_of(q, k, 0.4, 3, is_causal=True)
    below = torch.ones(200, 200, dtype=torch.bool).tril()
    assert torch.equal(full[0, 0][below] > 0, causal[0, 0][below] > 0)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2)])
def test_the_backward_drops_what_the_forward_dropped(heads: int, kv_heads: int) -> None:
    q, k, v = (torch.randn(1, h, 90, 8, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    wide_k = k.detach().repeat_interleave(heads // kv_heads, 1)
    kept = kept_of(q.detach(), wide_k, 0.3, 7)
    torch.manual_seed(7)
    out = sdpa(q, k, v, dropout_p=0.3, enable_gqa=True)
    grad_out = torch.randn_like(out)
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).transpose(-1, -2) / math.sqrt(8)
    wanted = (scores.softmax(-1) * kept) @ v.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), grad_out), torch.autograd.grad(wanted, (q, k, v), grad_out), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_dropping_all_gives_zero() -> None:
    q, k, v = (torch.randn(1, 1, 20, 8, requires_grad=True) for _ in range(3))
    out = sdpa(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in torch.autograd.grad(out.sum(), (q, k, v)))
