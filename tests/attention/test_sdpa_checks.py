# SPDX-License-Identifier: Apache-2.0
"""Refusals of scaled_dot_product_attention, and its behaviour as an op of torch: compile, opcheck, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.bias import causal_upper_left

import lowbit

sdpa = lowbit.scaled_dot_product_attention


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sdpa(heads(8), heads(4, 8), heads(4, 8)), ValueError, "query must have at least 2 dimensions"),
        (lambda: sdpa(heads(2, 4, 8), heads(2, 4, 6), heads(2, 4, 8)), ValueError, r"key must have shape \[1, 2, 4, 8\], got \[1, 2, 4, 6\]"),
        (lambda: sdpa(heads(2, 4, 8), heads(2, 4, 8), heads(2, 5, 8)), ValueError, r"value must have shape \[1, 2, 4, 8\], got \[1, 2, 5, 8\]"),
        (lambda: sdpa(heads(2, 4, 8), heads(3, 4, 8), heads(3, 4, 8)), ValueError, "must broadcast"),
        (lambda: sdpa(heads(1, 4, 4, 8), heads(1, 2, 4, 8), heads(1, 2, 4, 8)), ValueError, "enable_gqa"),
        (lambda: sdpa(heads(1, 3, 4, 8), heads(1, 2, 4, 8), heads(1, 2, 4, 8), enable_gqa=True), ValueError, "heads of query"),
        (lambda: sdpa(heads(4, 8), heads(4, 8, dtype=torch.float16), heads(4, 8)), TypeError, "key must be float32, got float16"),
        (lambda: sdpa(*(heads(4, 8).int(),) * 3), TypeError, "query must be float32"),
        (lambda: sdpa(heads(1, 4, 4, 8), heads(1, 2, 4, 8), heads(1, 3, 4, 8), enable_gqa=True), ValueError, "heads of query"),
        (lambda: sdpa(heads(1, 4, 4, 8), heads(1, 0, 4, 8), heads(1, 0, 4, 8), enable_gqa=True), ValueError, "heads of query"),
        (lambda: sdpa(*(heads(4, 8),) * 3, attn_mask=torch.ones(3, 4)), ValueError, "attn_mask must broadcast"),
        (lambda: sdpa(*(heads(4, 8),) * 3, attn_mask=torch.ones(4, 4).int()), TypeError, "attn_mask must be bool"),
        (lambda: sdpa(*(heads(4, 8),) * 3, dropout_p=1.5), ValueError, "dropout_p must be between 0 and 1"),
        (lambda: sdpa(heads(4, 8), None, heads(4, 8)), TypeError, "key must be a tensor, got NoneType"),
        (lambda: sdpa(*(heads(4, 8),) * 3, attn_mask=[[True]]), TypeError, "attn_mask must be a tensor, got list"),
        (lambda: sdpa(*(heads(4, 8),) * 3, attn_mask=causal_upper_left(4, 5)), ValueError, "a CausalBias of lengths 4, 4, got 4, 5"),
        (lambda: sdpa(*(heads(4, 8),) * 3, attn_mask=causal_upper_left(4, 4), is_causal=True), ValueError, "CausalBias should not be used"),
        (lambda: sdpa(*(heads(4, 8),) * 3, scale="large"), TypeError, "scale must be a number, got str"),
        (lambda: sdpa(*(heads(4, 8),) * 3, scale=float("nan")), ValueError, "scale must be finite"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_opcheck() -> None:
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    mask, seed = torch.randn(1, 1, 20, 20), torch.tensor(3)
    forward = (q, k, v, 0.3, False, mask, 0.1, seed, [], [], [], [], [], [128, 128], None, True)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.lowbit.attention_forward.default, forward, test_utils=utils)
    out, lse, _ = torch.ops.lowbit.attention_forward(*forward)
    backward = (q, k, v, out, lse, torch.randn_like(out), None, 0.3, False, mask, 0.1, seed, [], [], [], [], [], [], [128, 128], None, True, False)
    torch.library.opcheck(torch.ops.lowbit.attention_backward.default, backward, test_utils=utils)


def test_compiles_without_a_graph_break_and_trains() -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (sdpa(q, k, v, mask, enable_gqa=True) ** 2).sum() + sdpa(q, k, v, is_causal=True, enable_gqa=True).sum()

    q, k, v = torch.randn(2, 4, 33, 16), torch.randn(2, 2, 47, 16), torch.randn(2, 2, 47, 16)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(33, 47))]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_checkpointing_draws_the_same_dropout() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    grads = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        function = lambda q, k, v: sdpa(q, k, v, dropout_p=0.5)  # noqa: E731
        out = torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False) if checkpoint else function(q, k, v)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_memory_grows_with_the_length_and_not_with_its_square(python: Callable[..., str]) -> None:
    code = """
import resource, torch, lowbit
q, k, v = (torch.randn(1, 1, 16384, 16, requires_grad=True) for _ in range(3))
lowbit.scaled_dot_product_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lowbit.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    assert int(python(code)) < 64, "MiB; the scores of one head are 1024"
