# SPDX-License-Identifier: Apache-2.0
"""Where rows of one tile see different columns, forward and backward, and where the largest score moves: on every row, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from row_fixture import fixture_of
from settings import same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

KINDS = ("float32", "bfloat16", "float16")
FORWARD, BACKWARD = (
    [row for row in testing.rows(op) if str(row["name"]).startswith(tuple(f"{op}_{kind}" for kind in KINDS))] for op in ("attention_forward", "attention_backward")
)


def dtype_of(row: str) -> torch.dtype:
    return testing.attention_dtypes(row)[0]


def rounding(row: str) -> float:
    """The allowed error of results of a few units besides that of float32: results of 8 bits, or of 11."""
    return {torch.float32: 0.0, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype_of(row)]


def random(row: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype_of(row))


row, backward_row = fixture_of(FORWARD), fixture_of(BACKWARD)


def softmax_of(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp() @ v, lse


def table_mask() -> list[int]:
    """table[q, k]"""
    p = ProgramBuilder()
    return p.finish(p.gather(p.captured("bool", 2), p.op("q"), p.op("k")))


def masks(length: int, kv_length: int) -> dict[str, Tensor]:
    q, k = torch.arange(length)[:, None], torch.arange(kv_length)
    return {
        "single keys": k == (q * 37) % kv_length,
        "sparse": torch.rand(length, kv_length) < 0.02,
        "islands": (k // 16 + q // 7) % 3 == 0,
        "every fifth row": (q % 5 == 0) & (k >= 0),
        "two ends": ((k < 3) | (k >= kv_length - 2)) & (q >= 0),
        "window": (k <= q) & (k > q - 40),
        "nothing": torch.zeros(length, kv_length, dtype=torch.bool),
    }


@pytest.mark.parametrize("name", list(masks(1, 1)))
@pytest.mark.parametrize("sizes", [(1, 1), (131, 257), (300, 150)], ids=str)
def test_any_mask_gives_what_the_dense_one_does(row: str, name: str, sizes: tuple[int, int], subtests: pytest.Subtests) -> None:
    sizes = tuple(max(pair) for pair in zip(sizes, testing.fewest_scores(row), strict=True))
    keep = masks(*sizes)[name]
    q, k, v = (random(row, 1, 2, n, 24) for n in (sizes[0], sizes[1], sizes[1]))
    bias = torch.randn(2, *sizes)
    p = ProgramBuilder()
    biased = p.finish(p.op("add", p.op("score"), p.gather(p.captured("float", 3), p.op("h"), p.op("q"), p.op("k"))))
    for causal in (False, True):
        with subtests.test(causal=causal):
            with lowbit.force_kernel(row):
                out, lse, _ = attention(
                    q, k, v, scale=0.2, causal=causal, score_mod=biased, score_captured=[bias], mask_mod=table_mask(), mask_captured=[keep]
                )
            assert _C.last_kernel("attention_forward") == row
            seen = keep & (torch.arange(sizes[1]) <= torch.arange(sizes[0])[:, None]) if causal else keep
            scores = q.double() @ k.double().mT * 0.2 + bias.double()
            wanted, wanted_lse = softmax_of(scores.masked_fill(~seen, -math.inf), v.double())
            assert torch.equal(lse == -math.inf, (wanted_lse == -math.inf))
            assert (out.double() - wanted).abs().max() < 1e-5 + rounding(row)
            some = seen.any(-1)
            assert not some.any() or (lse.double() - wanted_lse)[..., some].abs().max() < 1e-5


@pytest.mark.parametrize("name", list(masks(1, 1)))
@pytest.mark.parametrize("sizes", [(1, 1), (131, 257), (300, 150)], ids=str)
@pytest.mark.parametrize("captured_gradient", [False, True], ids=["head by head", "with a bias"])
def test_gradients_of_any_mask_are_those_of_the_dense_one(backward_row: str, name: str, sizes: tuple[int, int], captured_gradient: bool, subtests: pytest.Subtests) -> None:
    """Without and with gradients of the bias: a task is a kv head, or a tile of keys or of queries."""
    sizes = tuple(max(pair) for pair in zip(sizes, testing.fewest_scores(backward_row), strict=True))
    keep = masks(*sizes)[name]
    q, k, v = (random(backward_row, 1, h, n, 24).requires_grad_() for h, n in ((4, sizes[0]), (2, sizes[1]), (2, sizes[1])))
    bias = torch.randn(4, *sizes, requires_grad=captured_gradient)
    p = ProgramBuilder()
    biased = p.finish(p.op("add", p.op("score"), p.gather(p.captured("float", 3), p.op("h"), p.op("q"), p.op("k"))))
    inputs = (q, k, v, bias) if captured_gradient else (q, k, v)
    for causal in (False, True):
        with subtests.test(causal=causal):
            with lowbit.force_kernel(backward_row):
                out, lse, _ = attention(
                    q, k, v, scale=0.2, causal=causal, score_mod=biased, score_captured=[bias], mask_mod=table_mask(), mask_captured=[keep]
                )
                grads = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -math.inf, 0.0)
                found = torch.autograd.grad((out, lse), inputs, grads)
            assert _C.last_kernel("attention_backward") == backward_row
            seen = keep & (torch.arange(sizes[1]) <= torch.arange(sizes[0])[:, None]) if causal else keep
            wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
            scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.2 + wide[3]
            some = seen.any(-1)  # softmax of nothing but -inf has no gradient in torch, not 0
            wanted_out, wanted_lse = softmax_of(scores.masked_fill(~seen, -math.inf)[..., some, :], wide[2].repeat_interleave(2, 1))
            wanted = torch.autograd.grad((wanted_out, wanted_lse), wide[: len(inputs)], [g[:, :, some].double() for g in grads], allow_unused=True)
            for a, w in zip(found, wanted, strict=True):
                w = torch.zeros_like(a, dtype=torch.float64) if w is None else w
                assert (a.double() - w).abs().max() < (2e-5 + rounding(backward_row)) * max(1.0, w.abs().max().item())


def test_a_mod_whose_derivative_is_infinite_at_0_has_finite_gradients_under_a_mask(backward_row: str) -> None:
    """Scores that no query sees are not multiplied; were they 0 for the reverse program, 0 * inf would reach sums over rows and columns."""
    length = max(200, *testing.fewest_scores(backward_row))
    q, k, v = (torch.rand(1, 2, length, 16).to(dtype_of(backward_row)).requires_grad_() for _ in range(3))
    slope = torch.ones(2, requires_grad=True)
    p = ProgramBuilder()
    rooted = p.finish(p.op("mul", p.op("sqrt", p.op("score")), p.gather(p.captured("float", 1), p.op("h"))))
    index = torch.arange(length)
    keep = (index <= index[:, None]) & (index > index[:, None] - 30)
    with lowbit.force_kernel(backward_row):
        out, *_ = attention(q, k, v, scale=0.2, score_mod=rooted, score_captured=[slope], mask_mod=table_mask(), mask_captured=[keep])
        found = torch.autograd.grad(out.square().sum(), (q, k, v, slope))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, slope)]
    scores = (wide[0] @ wide[1].mT * 0.2).sqrt() * wide[3][:, None, None]
    wanted_out, _ = softmax_of(scores.masked_fill(~keep, -math.inf), wide[2])
    for a, w in zip(found, torch.autograd.grad(wanted_out.square().sum(), wide), strict=True):
        assert (a.double() - w).abs().max() < (2e-5 + rounding(backward_row)) * max(1.0, w.abs().max().item())


@pytest.mark.parametrize("name", ["islands", "window", "sparse"])
def test_gradients_under_a_mask_have_the_same_bits_for_any_number_of_threads(backward_row: str, name: str) -> None:
    keep = masks(300, 290)[name]
    q, k, v = (random(backward_row, 1, 1, n, 24).requires_grad_() for n in (300, 290, 290))
    grad = random(backward_row, 1, 1, 300, 24)

    def gradients() -> tuple[Tensor, ...]:
        with lowbit.force_kernel(backward_row):
            out, *_ = attention(q, k, v, scale=0.2, mask_mod=table_mask(), mask_captured=[keep])
            return torch.autograd.grad(out, (q, k, v), grad)

    same_for_any_threads(gradients, (1, 2, 5))


@pytest.mark.parametrize("step", [0.001, 0.03, 0.05, 1.0, 50.0])
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_the_largest_score_may_move_slowly_or_fast_and_is_reported(row: str, step: float, sign: int) -> None:
    q, k, v = random(row, 1, 1, 70, 16), random(row, 1, 1, 1000, 16), random(row, 1, 1, 1000, 20)
    slope = torch.tensor([sign * step])
    p = ProgramBuilder()
    slopes = p.gather(p.captured("float", 1), p.op("h"))
    code = p.finish(p.op("add", p.op("score"), p.op("mul", p.convert(p.op("k"), "float"), slopes)))
    sink = torch.tensor([sign * step * 500])
    with lowbit.force_kernel(row):
        out, lse, largest = attention(q, k, v, scale=0.25, score_mod=code, score_captured=[slope], sink=sink, want_max_scores=True)
        plain, plain_lse, none = attention(q, k, v, scale=0.25, score_mod=code, score_captured=[slope], sink=sink)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    scores = q.double() @ k.double().mT * 0.25 + torch.arange(1000) * slope.double()
    columns = torch.cat([scores, sink.double().expand(1, 1, 70, 1)], -1)
    wanted_lse = columns.logsumexp(-1)
    wanted = (scores - wanted_lse[..., None]).exp() @ v.double()
    magnitude = max(1.0, scores.abs().max().item())
    assert (lse.double() - wanted_lse).abs().max() < 2e-7 * magnitude + 1e-5
    assert (largest.double() - scores.amax(-1)).abs().max() < 2e-7 * magnitude + 1e-5
    assert (out.double() - wanted).abs().max() < (2e-7 * magnitude + 1e-5) * 4 + rounding(row)


@pytest.mark.parametrize("what", [math.nan, math.inf], ids=str)
def test_a_row_that_is_not_a_number_leaves_the_others_alone(row: str, what: float) -> None:
    q, k, v = random(row, 1, 1, 100, 16), random(row, 1, 1, 400, 16), random(row, 1, 1, 400, 16)
    with lowbit.force_kernel(row):
        clean, *_ = attention(q, k, v, scale=0.25)
        q[0, 0, 41, 3] = what
        out, *_ = attention(q, k, v, scale=0.25)
    assert out[0, 0, 41].isnan().all()
    others = torch.arange(100) != 41
    assert torch.equal(out[0, 0, others], clean[0, 0, others])


def test_the_rows_around_a_row_do_not_change_its_bits(row: str, subtests: pytest.Subtests) -> None:
    """Tiles, blocks of rows and spans depend on how many rows there are; what a row sums and in which order does not."""
    length = 290
    q, k, v = (random(row, 1, 1, length, 32) for _ in range(3))
    keep = torch.rand(length, length) < 0.05
    with lowbit.force_kernel(row):
        whole, *_ = attention(q, k, v, scale=0.2, mask_mod=table_mask(), mask_captured=[keep])
        for first, last in ((0, 33), (17, 18 + 47), (100, 290)):
            with subtests.test(first=first, last=last):
                part, *_ = attention(q[:, :, first:last], k, v, scale=0.2, mask_mod=table_mask(), mask_captured=[keep[first:last].contiguous()])
                assert torch.equal(part, whole[:, :, first:last])
