# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors through the whole backward: small and large ones, written apart or summed per slice, the same bits for any threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from score_programs import code_of
from settings import same_for_any_threads
from torch import Tensor

from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder, Value

BATCH, HEADS, LENGTH = 2, 2, 300


def per_head_bias(p: ProgramBuilder) -> Value:
    """[H, L, S]: large; heads and queries write apart, batches do not."""
    return p.op("add", p.op("score"), p.gather(p.captured("float", 3), p.op("h"), p.op("q"), p.op("k")))


def full_bias(p: ProgramBuilder) -> Value:
    """[B, H, L, S]: large; no two threads write to one element."""
    return p.op("add", p.op("score"), p.gather(p.captured("float", 4), p.op("b"), p.op("h"), p.op("q"), p.op("k")))


def both_orders(p: ProgramBuilder) -> Value:
    """[L, S], read as [q, k] and as [k, q]: queries do not write apart."""
    bias = p.captured("float", 2)
    return p.op("add", p.op("score"), p.op("mul", p.gather(bias, p.op("q"), p.op("k")), p.gather(bias, p.op("k"), p.op("q"))))


def flat_index(p: ProgramBuilder) -> Value:
    """[H * L * S]: large, and its index proves nothing: one slice."""
    row = p.op("add", p.op("mul", p.op("h"), p.constant(LENGTH)), p.op("q"))
    return p.op("add", p.op("score"), p.gather(p.captured("float", 1), p.op("add", p.op("mul", row, p.constant(LENGTH)), p.op("k"))))


def table_and_slope(p: ProgramBuilder) -> Value:
    """[2 L] per diagonal and [H] per head: small."""
    distance = p.op("sub", p.op("k"), p.op("q"))
    table = p.gather(p.captured("float", 1), p.op("add", distance, p.constant(LENGTH)))
    slope = p.gather(p.captured("float", 1), p.op("h"))
    return p.op("add", p.op("mul", p.op("score"), slope), table)


L, S = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
PROGRAMS: dict[Callable[[ProgramBuilder], Value], tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    per_head_bias: ([(HEADS, LENGTH, LENGTH)], lambda s, t: s + t),
    full_bias: ([(BATCH, HEADS, LENGTH, LENGTH)], lambda s, t: s + t),
    both_orders: ([(LENGTH, LENGTH)], lambda s, t: s + t * t.t()),
    flat_index: ([(HEADS * LENGTH * LENGTH,)], lambda s, t: s + t.view(HEADS, LENGTH, LENGTH)),
    table_and_slope: ([(2 * LENGTH,), (HEADS,)], lambda s, t, a: s * a[:, None, None] + t[S - L + LENGTH]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_gradient_is_that_of_autograd_and_the_same_for_any_threads(build: Callable[[ProgramBuilder], Value], dtype: torch.dtype) -> None:
    shapes, meaning = PROGRAMS[build]
    real = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, grad_out = (torch.randn(BATCH, HEADS, LENGTH, 8, dtype=real) for _ in range(4))
    captured = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]

    def gradients() -> tuple[torch.Tensor, ...]:
        out, *_ = attention(q, k, v, scale=0.3, score_mod=code_of(build), score_captured=captured)
        return torch.autograd.grad(out, captured, grad_out)

    found = same_for_any_threads(gradients, (1, 2))
    exact = [t.detach().double().requires_grad_() for t in captured]
    scores = meaning(0.3 * q.double() @ k.double().mT, *exact)
    wanted = torch.autograd.grad(scores.softmax(-1) @ v.double(), exact, grad_out.double())
    for one, want in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        epsilon = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 64 * torch.finfo(real).eps
        error = (one.double() - want).abs().max()
        assert error <= epsilon * want.abs().max(), f"{error} of {want.abs().max()}"
