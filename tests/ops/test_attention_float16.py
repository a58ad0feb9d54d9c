# SPDX-License-Identifier: Apache-2.0
"""float16 by every row of attention that takes it: two parts of 8 bits hold each of its values, and sums are float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention

PAIRS = [
    (forward, str(forward["name"]).replace("forward", "backward"))
    for forward in testing.rows("attention_forward")
    if str(forward["name"]).split("_")[2] in ("float32", "float16")
]
LARGEST = torch.finfo(torch.float16).max


@pytest.fixture(params=PAIRS, ids=[str(forward["name"]) for forward, _ in PAIRS])
def rows(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Force a row of the forward and the one of the backward beside it."""
    forward, backward = request.param
    if not forward["available"]:
        pytest.skip(f"{forward['name']}: {forward['reason']}")
    with lowbit.force_kernel(str(forward["name"])), lowbit.force_kernel(backward):
        yield str(forward["name"]), backward
        assert _C.last_kernel("attention_forward") == forward["name"]
        assert _C.last_kernel("attention_backward") == backward


def test_every_finite_value_is_held_exactly(rows: tuple[str, str]) -> None:
    """A query sees one key: its score is the value, the result is the value, and so is the gradient."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    values = bits.masked_fill(~bits.isfinite(), 0.0).reshape(1, 128, 512, 1)
    ones = torch.zeros(1, 128, 512, 33, dtype=torch.float16)
    alone = torch.eye(512, dtype=torch.bool).expand(1, 128, 512, 512)
    ones[..., 32] = 1  # the last column, behind a whole step of 32
    many = values.expand(1, 128, 512, 33).contiguous()
    for q, k in ((ones, many), (many, ones)):
        v = many.clone().requires_grad_()
        out, lse, _ = attention(q, k, v, scale=1.0, mask=alone)
        assert torch.equal(lse, values[..., 0].float())
        assert torch.equal(out.half(), many)
        assert torch.equal(torch.autograd.grad(out, v, many.to(out.dtype))[0], many)


def test_results_near_the_largest_and_beyond(rows: tuple[str, str]) -> None:
    """Sums are float32: results are finite up to 65519, and inf where they are larger."""
    length = 64
    q, k = (torch.zeros(1, 2, length, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))
    v = torch.full((1, 2, length, 80), LARGEST, dtype=torch.float16)
    v[..., 1::2] *= -1
    v.requires_grad_()
    out = lowbit.scaled_dot_product_attention(q, k, v)  # every probability 1 / 64
    assert torch.equal(out, v)
    for size in (LARGEST, 2.0, 1024.0):
        grads = torch.autograd.grad(out, (q, k, v), torch.full_like(out, size), retain_graph=True)
        assert (grads[2] == size).all()
    grad_out = torch.zeros_like(out)
    grad_out[:, :, :, 0] = LARGEST
    one = torch.zeros(length, length, dtype=torch.bool)
    one[:, 0] = True  # all see one key, whose gradient is the sum of 64
    out = lowbit.scaled_dot_product_attention(q, k, v, one)
    grad = torch.autograd.grad(out, v, grad_out)[0]
    assert (grad[:, :, 0, 0] == torch.inf).all() and (grad[:, :, 1:] == 0).all() and (grad[..., 1:] == 0).all()


def test_scores_far_beyond_float16_are_sums_of_float32(rows: tuple[str, str]) -> None:
    length = 40
    q, k, v = (torch.randn(1, 2, length, 64).half() for _ in range(3))
    q, k = (q * 3000).clamp(-LARGEST, LARGEST).half(), (k * 3000).half()  # scores of 10^8
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = lowbit.scaled_dot_product_attention(q, k, v, scale=1e-7)
    wanted = torch.softmax(q.double() @ k.double().mT * 1e-7, -1) @ v.double()
    assert (out.double() - wanted).abs().max() < 2**-9
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_head_dimensions_groups_tails_and_strides(rows: tuple[str, str]) -> None:
    for (e, ev), (length, keys), causal in itertools.product(
        ((64, 64), (80, 80), (96, 128), (128, 96), (256, 256), (33, 7)), ((70, 300), (129, 129)), (False, True)
    ):
        q = torch.randn(1, length, 4, e).half().transpose(1, 2)
        k, v = (torch.randn(1, keys, 2, 2 * n).half().transpose(1, 2)[..., :n] for n in (e, ev))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = lowbit.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        grad_out = torch.randn_like(out)
        found = out, *torch.autograd.grad(out, (q, k, v), grad_out)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wide = [x.repeat_interleave(2, 1) if i else x for i, x in enumerate(exact)]
        result = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
        wanted = result, *torch.autograd.grad(result, exact, grad_out.double())
        for name, a, w in zip(("out", "q", "k", "v"), found, wanted, strict=True):
            allowed = 2**-15 * w.abs().max() + testing.ROUNDOFF["float16"] * w.abs()
            assert ((a.double() - w).abs() <= allowed).all(), (name, e, ev, length, keys, causal)
