# SPDX-License-Identifier: Apache-2.0
"""A traced mod computes what torch computes, op by op and index by index; it is kept for new tensors and lengths, and only then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import internals
from torch import Tensor, nn
from torch.nn import functional

from lowbit.score import program_cache
from lowbit.score.program import UnknownOp

BIAS, ROW, IDS = torch.randn(2, 3, 20, 24), torch.randn(24), torch.randint(0, 3, (24,))
EDGES = torch.tensor([-7, -2, 0, 3, 3, 11])
FLAGS, BYTES = torch.rand(24) > 0.5, torch.randint(-3, 3, (24,), dtype=torch.int8)

MODS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda s, b, h, q, k: (s + 2) * 3 - s / 4 + (1 - s) ** 2 + 2.0**s + s % 0.7 + s // 0.3 - -s,
    "reversed": lambda s, b, h, q, k: 3 - s + 2 / (s.abs() + 1) + 5 // (k + 1) + 7 % (q + 1),
    "ints": lambda s, b, h, q, k: s + (q // 3) * 2 - (q - k) % 5 + ((q - k) // 4) + (q << 1) + (k >> 1) + (q & 3) + (q | 4) + (k ^ q) - ~q,
    "int division": lambda s, b, h, q, k: s + (q - k) / 7 + torch.div(q - k, 3, rounding_mode="trunc") + torch.fmod(q - k, 4),
    "compare": lambda s, b, h, q, k: torch.where((q >= k) & ~(k == 3) | (s > 0.5) ^ (h != 1), s, s * 2),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_and(q, k > 2) | torch.logical_not(b), s, 0.0),
    "float functions": lambda s, b, h, q, k: torch.exp(s) + torch.sin(s) * torch.cos(s) + torch.tan(s / 4) + torch.tanh(s) + torch.sigmoid(s)
    + torch.erf(s) + torch.log1p(s.abs()) + torch.sqrt(s.abs()) + torch.rsqrt(s.abs() + 1) + torch.exp2(s) + torch.expm1(s) + torch.atan(s),
    "activations": lambda s, b, h, q, k: functional.gelu(s) + functional.gelu(s, approximate="tanh") + functional.silu(s) + functional.relu(s)
    + functional.softplus(s) + functional.elu(s) + functional.leaky_relu(s, 0.1) + s.square() + s.reciprocal().clamp(-3, 3),
    "rounding": lambda s, b, h, q, k: torch.round(s * 3) + torch.floor(s * 5) + torch.ceil(s * 7) + torch.trunc(s * 9) + torch.sign(s),
    "clamp": lambda s, b, h, q, k: s.clamp(min=-0.5) + s.clamp(max=0.25) + torch.clamp(q - k, -3, 3) + torch.maximum(s, s * 2) - torch.minimum(s, -s),
    "casts": lambda s, b, h, q, k: s.to(torch.bfloat16).float() + s.half() + (s * 10).int() + (q > k).float() + s.bool() + q.to(torch.float32),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -torch.inf),
    "constants": lambda s, b, h, q, k: s + torch.tensor(2.5) * torch.ones(()) + torch.zeros_like(s) + s.new_full((), 3) + torch.pi,
    "isinf": lambda s, b, h, q, k: torch.where(torch.isinf(s / 0.0) & ~torch.isnan(s), s, -s),
    "index": lambda s, b, h, q, k: s + BIAS[b, h, q, k] + ROW[k],
    "index by parts": lambda s, b, h, q, k: s + BIAS[b][h][q][k] + BIAS[0, h, ..., k][q] + BIAS[:, 1][b, q, 3] + BIAS[b, 1:, q, -1][h - 1],
    "index negative": lambda s, b, h, q, k: s + ROW[k - q - 1] + ROW[-1] + ROW[3],
    "index with None": lambda s, b, h, q, k: s + BIAS[b, h, q, None, k][0] + ROW[None, k][0],
    "index by index": lambda s, b, h, q, k: s + torch.eye(3)[IDS[k], IDS[q]] * IDS[k],
    "index_select": lambda s, b, h, q, k: s + ROW.index_select(0, k)[0] + functional.embedding(k, BIAS[0, 0].T)[2],
    "rows": lambda s, b, h, q, k: s + (BIAS[b, h, q, :4] * BIAS[b, h, q, 4:8]).sum() + torch.dot(BIAS[0, h, q, :3], ROW[:3]) + BIAS[b, h, q].mean(),
    "reductions": lambda s, b, h, q, k: s + BIAS[b, h, q, :5].amax() - BIAS[b, h, q, :5].amin() + (BIAS[b, h, q, :5] > 0).any() + torch.stack([s, s * 2]).sum(),
    "max and min": lambda s, b, h, q, k: s + BIAS[b, h, q, :5].max() - torch.min(BIAS[b, h, k % 20]) + torch.max(s, s * 2) - torch.min(q, k),
    "boundaries": lambda s, b, h, q, k: s + torch.bucketize(q - k, EDGES) + torch.bucketize(k, EDGES, right=True) + torch.searchsorted(EDGES, q)
    + torch.searchsorted(ROW[:5].cumsum(0).abs().sort().values, s, side="right"),
    "mixtures": lambda s, b, h, q, k: torch.lerp(s, ROW[k], 0.3) + torch.addcmul(s, ROW[q], ROW[k], value=0.5) + torch.logaddexp(s, ROW[k] * 9)
    + torch.logaddexp(-s / 0.0, -s / 0.0).clamp(-9, 9) + torch.frac(s * 3) + functional.threshold(s, 0.1, -2.0),
    "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(torch.where(s > 0.5, s * 0 / 0, s / (q % 2)), 3.0, 4.0, -5.0) + torch.nan_to_num(s / 0).sign(),
    "index by a list": lambda s, b, h, q, k: s + BIAS[0, 0][[1, 3]][q % 2, k] + ROW[[2, 4, 6]].sum() + BIAS[b, h, q, range(3)].sum(),
    "bool tensor": lambda s, b, h, q, k: torch.where(FLAGS[k], s, s + 1) + FLAGS[q],
    "small ints": lambda s, b, h, q, k: s + BYTES[k],
    "whole tensors": lambda s, b, h, q, k: s + torch.softmax(ROW, 0)[k] + (BIAS * 2 + 1)[b, h, q, k] + ROW.flip(0)[k] + torch.arange(24)[k],
    "in place": lambda s, b, h, q, k: (s * 2).add_(1).mul_(3),
}


def evaluate(mod: Callable[..., Any], b: int, h: int, rows: int = 17, cols: int = 21) -> tuple[Tensor, Tensor]:
    """The results of the program for a tile, and of torch score by score."""
    scores = torch.randn(rows, cols)
    bound = program_cache.bind("test", mod, mask=False)
    ours = scores.clone()
    if bound.code:
        internals.score_program_eval(bound.code, bound.captured, b, h, 2, 1, ours)
    place = [torch.tensor(value, dtype=torch.int32) for value in (b, h)]
    wanted = torch.stack([
        torch.stack([torch.as_tensor(mod(scores[r, c], *place, torch.tensor(r + 2, dtype=torch.int32), torch.tensor(c + 1, dtype=torch.int32))) for c in range(cols)])
        for r in range(rows)
    ])  # fmt: skip
    return ours, wanted.float()


@pytest.mark.parametrize("name", MODS)
def test_program_is_torch(name: str) -> None:
    ours, wanted = evaluate(MODS[name], 1, 2)
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.factor = nn.Parameter(torch.randn(40)), 2.0

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.factor

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.scaled(s) + self.table[q - k + 20]


def test_captured_tensors_are_found_wherever_they_are(subtests: pytest.Subtests) -> None:
    module = WithState()

    def with_default(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor = torch.randn(30)) -> Tensor:  # noqa: B008
        return s + table[k]

    def with_argument(table: Tensor, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, other: dict[str, Tensor]) -> Tensor:
        return s + table[k] + other["x"][q]

    partial = functools.partial(with_argument, torch.randn(30), other={"x": torch.randn(30)})
    partial.__name__ = "partial"
    for mod, tensors in ((module, 1), (module.forward, 1), (with_default, 1), (partial, 2), (MODS["index"], 2)):
        with subtests.test(tensors=tensors):
            ours, wanted = evaluate(mod, 0, 1)
            torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)
            assert len(program_cache.bind("test", mod, mask=False).captured) == tensors


def test_new_tensors_do_not_trace_again_and_new_constants_do() -> None:
    def make(table: Tensor, factor: float, length: int) -> Callable[..., Tensor]:
        ids = torch.arange(length)
        return lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s * factor, table[h])

    program_cache.bind("test", make(torch.randn(3), 0.5, 10), mask=False)
    before = program_cache.traces
    for length in (10, 20, 33):
        tensors = program_cache.bind("test", make(torch.randn(length), 0.5, length), mask=False).captured
        assert {tensor.shape[0] for tensor in tensors} == {length}
    assert program_cache.traces == before
    codes = [program_cache.bind("test", make(torch.randn(3), factor, 10), mask=False).code for factor in (0.5, 0.25, 1, True)]
    assert program_cache.traces == before + 3 and len({str(code) for code in codes}) >= 3
    program_cache.bind("test", make(torch.randn(3, dtype=torch.float64), 0.5, 10), mask=False)
    assert program_cache.traces == before + 4


def test_what_the_mod_reads_of_a_tensor_in_python_is_not_kept_wrongly(subtests: pytest.Subtests) -> None:
    def length_of(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table.shape[0]

    def value_of(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table.item()

    def sum_of(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table[: len(table) // 2].sum()

    for make, first, second in (
        (length_of, torch.ones(3), torch.ones(5)), (value_of, torch.tensor(1.0), torch.tensor(4.0)), (sum_of, torch.ones(4), torch.ones(9)),
    ):  # fmt: skip
        with subtests.test(make.__name__):
            for table in (first, second, first):
                ours, wanted = evaluate(make(table), 0, 0, 2, 2)
                torch.testing.assert_close(ours, wanted)


class Counter:
    def __init__(self) -> None:
        self.factor = 1.0


def test_an_object_that_changes_is_seen() -> None:
    state, values = Counter(), [1.0]
    mod = lambda s, b, h, q, k: s * state.factor + values[0]  # noqa: E731
    for factor in (1.0, 3.0, 1.0):
        state.factor, values[0] = factor, factor
        ours, wanted = evaluate(mod, 0, 0, 2, 2)
        torch.testing.assert_close(ours, wanted)


def test_gradients_reach_captured_tensors_through_steps() -> None:
    table = torch.randn(24, requires_grad=True)
    bound = program_cache.bind("test", lambda s, b, h, q, k: s + torch.softmax(table, 0)[k], mask=False)
    assert bound.captured[0].requires_grad and bound.captured[0] is not table
    (grad,) = torch.autograd.grad(bound.captured[0][3], table)
    assert torch.allclose(grad, torch.autograd.grad(torch.softmax(table, 0)[3], table)[0])


@pytest.mark.parametrize("mod", [lambda s, b, h, q, k: torch.special.bessel_j0(s), lambda s, b, h, q, k: s + torch.zeros(3).scatter(0, k.long()[None], s[None])[0]])
def test_what_has_no_program_says_so(mod: Callable[..., Any]) -> None:
    with pytest.raises(UnknownOp):
        program_cache.bind("test", mod, mask=False)


@pytest.mark.parametrize(
    ("mod", "error", "text"),
    [
        (lambda s, b, h, q, k: s if s > 0 else -s, RuntimeError, "test: score_mod must not use the value of a tensor in Python"),
        (lambda s, b, h, q, k: s * int(q), RuntimeError, "must not use the value"),
        (lambda s, b, h, q, k: s + torch.rand_like(s), RuntimeError, "must not draw random numbers"),
        (lambda s, b, h, q, k: s + torch.rand(()), RuntimeError, "must not draw random numbers"),
        (lambda s, b, h, q, k: s + ROW.add_(1)[k], RuntimeError, "Mutations detected in score_mod"),
        (lambda s, b, h, q, k: s.mul_(2), RuntimeError, "Mutations detected in score_mod"),
        (lambda s, b, h, q, k: 1.0, ValueError, "score_mod must return a tensor, got float"),
        (lambda s, b, h, q, k: s + ROW, ValueError, r"one value per score \(a 0-d tensor\), got shape \[24\]"),
    ],
)
def test_bad_mods(mod: Callable[..., Any], error: type[Exception], text: str) -> None:
    before = ROW.clone(), torch.get_rng_state()
    with pytest.raises(error, match=text):
        program_cache.bind("test", mod, mask=False)
    assert torch.equal(ROW, before[0]) and torch.equal(torch.get_rng_state(), before[1])


def test_the_usual_mods_do_not_load_the_compiler(python: Callable[..., str]) -> None:
    """The first call must stay below 0.1 s; torch's tracing machinery alone takes 1.2 s to import."""
    code = """
import sys, torch, lowbit
q = torch.randn(1, 2, 64, 16)
slopes, ids = torch.rand(2), torch.arange(64) // 10
lowbit.flex_attention
modules = len(sys.modules)
mask = lowbit.create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 64, 64)
lowbit.flex_attention(q, q, q, lambda s, b, h, q, k: torch.tanh(s + (k - q) * slopes[h]), mask)
print("sympy" in sys.modules, "torch._dynamo" in sys.modules, "torch.distributed.tensor" in sys.modules)
"""
    assert "torch.distributed.tensor" not in python(code) and python(code).split()[-1] == "False"
