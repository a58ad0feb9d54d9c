# SPDX-License-Identifier: Apache-2.0
"""float16 by every row of attention that takes it: two parts of 8 bits hold each of its values, and sums are float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from row_fixture import fixture_of
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention

ROWS = [row for row in testing.rows("attention_forward") if str(row["name"]).split("_")[2] in ("float32", "float16")]
LARGEST = torch.finfo(torch.float16).max


row = fixture_of(ROWS)


def forward(row: str, call: Callable[[], Tensor | tuple[Tensor, ...]]) -> Tensor | tuple[Tensor, ...]:
    with lowbit.force_kernel(row):
        out = call()
    assert _C.last_kernel("attention_forward") == row
    return out


def gradients(row: str, out: Tensor, inputs: Sequence[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """By the row of the backward beside that of the forward."""
    backward = row.replace("forward", "backward")
    with lowbit.force_kernel(backward):
        grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    assert _C.last_kernel("attention_backward") == backward
    return grads


def test_every_finite_value_is_held_exactly(row: str) -> None:
    """A query sees one key: its score is the value, the result is the value, and so is the gradient."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    queries = max(32, testing.fewest_scores(row)[0])  # few to a head: a row of no instruction set multiplies all with all
    keys = max(queries, testing.fewest_scores(row)[1])
    values = bits.masked_fill(~bits.isfinite(), 0.0).reshape(1, -1, queries, 1)
    alone = torch.eye(queries, keys, dtype=torch.bool).expand(1, values.shape[1], -1, -1)
    many = values.expand(-1, -1, -1, 33).contiguous()
    ones = torch.zeros_like(many)
    ones[..., 32] = 1  # the last column, behind a whole step of 32
    pad = many.new_zeros(1, values.shape[1], keys - queries, 33)  # keys that nothing sees
    for q, k in ((ones, many), (many, ones)):
        k, v = torch.cat([k, pad], 2), torch.cat([many, pad], 2).requires_grad_()
        out, lse, _ = forward(row, lambda q=q, k=k, v=v: attention(q, k, v, scale=1.0, mask=alone))
        assert torch.equal(lse, values[..., 0].float())
        assert torch.equal(out.half(), many)
        assert torch.equal(gradients(row, out, [v], many.to(out.dtype))[0][:, :, :queries], many)


def test_results_near_the_largest_and_beyond(row: str) -> None:
    """Sums are float32: results are inf where they are larger than float16, and only there."""
    length = 256
    q, k = (torch.zeros(1, 2, length, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))
    v = torch.full((1, 2, length, 80), LARGEST, dtype=torch.float16)
    v[..., 1::2] *= -1
    v.requires_grad_()
    out = forward(row, lambda: lowbit.scaled_dot_product_attention(q, k, v))  # every probability 1 / 256
    assert torch.equal(out, v)
    for size in (LARGEST, 2.0, 1024.0):
        assert (gradients(row, out, [v], torch.full_like(out, size))[0] == size).all()
    grad_out, one = torch.zeros_like(out), torch.zeros(length, length, dtype=torch.bool)
    grad_out[..., 0], one[:, 0] = LARGEST, True  # all see one key, whose gradient is the sum of 256
    out = forward(row, lambda: lowbit.scaled_dot_product_attention(q, k, v, one))
    grad = gradients(row, out, [v], grad_out)[0]
    assert (grad[:, :, 0, 0] == torch.inf).all() and (grad[:, :, 1:] == 0).all() and (grad[..., 1:] == 0).all()


def test_scores_far_beyond_float16_are_sums_of_float32(row: str) -> None:
    q, k, v = (torch.randn(1, 2, 260, 64) for _ in range(3))
    q, k, v = ((x * size).half().requires_grad_() for x, size in ((q, 3000), (k, 3000), (v, 1)))  # scores of 10^8
    out = forward(row, lambda: lowbit.scaled_dot_product_attention(q, k, v, scale=1e-7))
    wanted = torch.softmax(q.double() @ k.double().mT * 1e-7, -1) @ v.double()
    assert (out.double() - wanted).abs().max() < 2**-9
    assert all(grad.isfinite().all() for grad in gradients(row, out, (q, k, v), torch.ones_like(out)))


def test_head_dimensions_groups_tails_and_strides(row: str, subtests: pytest.Subtests) -> None:
    sizes, call = ((64, 64), (80, 80), (96, 128), (128, 96), (256, 256), (33, 7)), lowbit.scaled_dot_product_attention
    for (e, ev), (length, keys, causal) in itertools.product(sizes, ((40, 300, False), (129, 257, True))):
        with subtests.test(e=e, ev=ev, length=length, keys=keys, causal=causal):
            q = torch.randn(1, length, 4, e).half().transpose(1, 2).requires_grad_()
            k, v = (torch.randn(1, keys, 2, 2 * n).half().transpose(1, 2)[..., :n].requires_grad_() for n in (e, ev))
            out = forward(row, lambda q=q, k=k, v=v, causal=causal: call(q, k, v, is_causal=causal, enable_gqa=True))
            grad_out = torch.randn_like(out)
            found = out, *gradients(row, out, (q, k, v), grad_out)
            exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
            wide = [x.repeat_interleave(2, 1) if i else x for i, x in enumerate(exact)]
            result = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
            wanted = result, *torch.autograd.grad(result, exact, grad_out.double())
            for name, a, w in zip(("out", "q", "k", "v"), found, wanted, strict=True):
                allowed = 2**-15 * w.abs().max() + testing.ROUNDOFF["float16"] * w.abs()
                assert ((a.double() - w).abs() <= allowed).all(), (name, e, ev, length, keys, causal)
