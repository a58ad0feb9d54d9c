# SPDX-License-Identifier: Apache-2.0
"""route: every row against float64; ties, nan and infinities; its gradient against that of the formula; what it
refuses. tests/models/test_routers.py has the routers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.reference.route import choices_of, weights_of

op = torch.ops.lowbit.route
route_row = fixture_of(testing.rows("route"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
SHAPES = [(1, 1, 1), (3, 7, 3), (2, 16, 2), (5, 17, 17), (40, 60, 6), (9, 128, 8), (3, 257, 5), (600, 512, 8)]
"""T, E, k; the last is large enough for several threads."""
CHOICE = ("correction", "groups", "groups_kept", "group_top", "zero_outside")
WEIGHTING = ("normalize", "eps", "least", "scale", "expert_scale")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"normalize": True},
    {"correction": 0.1, "normalize": True, "eps": 1e-20, "scale": 2.5},
    {"correction": 0.3, "expert_scale": 1.0},
    {"normalize": True, "least": 0.7, "eps": 1e-2, "scale": 0.5},
)
GROUPED: tuple[dict[str, Any], ...] = (
    {"groups": 4, "groups_kept": 2, "group_top": 2, "correction": 0.1, "normalize": True, "eps": 1e-20},
    {"groups": 10, "groups_kept": 3, "group_top": 1},
    {"groups": 5, "groups_kept": 1, "group_top": 3, "zero_outside": True, "correction": 0.5},
)


def made(options: dict[str, Any], experts: int) -> dict[str, Any]:
    """Numbers of experts in place of their spread."""
    return {
        name: torch.randn(experts) * value if name in ("correction", "expert_scale") else value
        for name, value in options.items()
    }


def some(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def assert_routed(logits: Tensor, k: int, scoring: str, options: dict[str, Any], routed: tuple[Tensor, Tensor]) -> None:
    """The experts are distinct, none better is left out, and their order is that of their choices, within the roundings
    of a score; the weights are those of these experts.

    A score has the roundings of its logit's distance from the largest, an exp (3.4), a sum of E by vectors of 16 and a
    quotient; a weight those of another sum and quotient, and of two factors."""
    weights, index = routed
    assert weights.dtype == torch.float32 and index.dtype == torch.int64 and weights.shape == index.shape == (len(logits), k)
    assert (index.sort(-1).values.diff(dim=-1) > 0).all() and index.min() >= 0 and index.max() < logits.shape[1]
    choices = choices_of(logits, scoring, **some(options, CHOICE))
    wide = logits.double()
    roundings = float((wide.amax(-1) - wide.amin(-1)).max()) + logits.shape[1] / 16 + 16
    largest = choices.topk(k, -1).values
    allowed = roundings * U * (1 + largest.abs())
    testing.assert_within(choices.gather(-1, index), largest, torch.where(largest.isfinite(), allowed, 0), what="choices")
    wanted = weights_of(logits, index, scoring, **some(options, WEIGHTING))
    testing.assert_within(weights, wanted, (2 * roundings + k + 8) * U * wanted.abs() + 1e-37, what="weights")


@pytest.mark.core
@pytest.mark.parametrize("scoring", _C.SCORINGS)
def test_every_row_is_within_budget_of_the_float64_reference(route_row: str, scoring: str, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    cases = [(shape, VARIANTS[i % len(VARIANTS)]) for i, shape in enumerate(SHAPES)]
    cases += [((9, 128, 8), options) for options in VARIANTS] + [((50, 60, 5), options) for options in GROUPED]
    for number, ((tokens, experts, k), options) in enumerate(cases):
        spread = 0 if "groups" in options else 1  # of far larger logits groups are equal in float32, and not in float64
        logits = torch.randn(tokens, experts) * torch.logspace(-1, spread, tokens)[:, None]
        logits = logits.to(DTYPES[number % 3])
        given = made(options, experts)
        if number % 2 and "correction" in given:
            given["correction"] = given["correction"].to(DTYPES[number % 3])
        with subtests.test(number=number, experts=experts, **options):
            with forced(route_row):
                routed = lowbit.route(logits, k, scoring=scoring, **given)
            assert_routed(logits, k, scoring, given, routed)


@pytest.mark.parametrize("scoring", _C.SCORINGS)
def test_of_equal_choices_the_first_is_taken_first(route_row: str, scoring: str) -> None:
    logits = torch.tensor([0.0, 2, 1, 2, 1, 0, 2, 1]).repeat(5, 8)
    with forced(route_row):
        _, index = lowbit.route(logits, 26, scoring=scoring)
    order = logits[0].argsort(descending=True, stable=True)
    assert index.equal(order[:26].expand(5, -1))
    with forced(route_row):
        _, index = lowbit.route(logits, 3, scoring=scoring, groups=8, groups_kept=2)
    assert index.tolist() == [[1, 3, 6]] * 5


@pytest.mark.parametrize("scoring", _C.SCORINGS)
@pytest.mark.parametrize("options", [{}, {"groups": 4, "groups_kept": 2, "group_top": 2}, {"normalize": True}], ids=str)
def test_nan_stays_in_its_token(route_row: str, scoring: str, options: dict[str, Any]) -> None:
    logits = torch.randn(6, 40)
    clean = lowbit.route(logits, 5, scoring=scoring, **options)
    logits[1, 0], logits[3, 39], logits[4] = torch.nan, torch.nan, torch.nan
    with forced(route_row):
        weights, index = lowbit.route(logits, 5, scoring=scoring, **options)
    assert weights[[1, 3, 4]].isnan().all() and index[[1, 3, 4]].equal(torch.arange(5).expand(3, -1))
    rest = [0, 2, 5]
    assert weights[rest].equal(clean[0][rest]) and index[rest].equal(clean[1][rest])
    with forced(route_row):
        weights, index = lowbit.route(torch.randn(2, 40), 5, scoring=scoring, correction=torch.full((40,), torch.nan))
    assert weights.isnan().all() and index.equal(torch.arange(5).expand(2, -1))


@pytest.mark.parametrize("scoring", _C.SCORINGS)
def test_a_logit_may_be_minus_infinity(route_row: str, scoring: str) -> None:
    logits = torch.randn(4, 20)
    logits[:, ::2] = -torch.inf
    with forced(route_row):
        weights, index = lowbit.route(logits, 12, scoring=scoring)
    assert (index[:, :10] % 2 == 1).all() and index[:, 10:].equal(torch.tensor([0, 2]).expand(4, 2))
    assert (weights[:, :10] > 0).all() and (weights[:, 10:] == 0).all()
    logits[0] = -torch.inf
    with forced(route_row):
        weights, index = lowbit.route(logits, 3, scoring=scoring)
    assert index[0].tolist() == [0, 1, 2] and weights[1:].isfinite().all()
    assert (weights[0].isnan() if scoring.startswith("softmax") else weights[0] == 0).all()


def test_a_logit_of_infinity_gives_nan_where_softmax_does() -> None:
    logits = torch.randn(2, 20)
    logits[0, 7] = torch.inf
    for scoring in _C.SCORINGS:
        weights, index = lowbit.route(logits, 3, scoring=scoring)
        assert weights[0].isnan().any() == scoring.startswith("softmax") and weights[1].isfinite().all()
        assert len(index[0].unique()) == 3
    assert lowbit.route(logits, 3, scoring="sigmoid")[0][0, 0] == 1


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0], [1e5, 1e5 - 1, 0, -1e5]])
    for scoring in ("softmax", "softmax_of_chosen"):
        weights, index = lowbit.route(logits, 2, scoring=scoring)
        assert index.tolist() == [[0, 2], [0, 1]]
        torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5], [0.7310586, 0.2689414]]))
    torch.testing.assert_close(lowbit.route(logits, 1, scoring="sqrt_softplus")[0][0, 0], torch.tensor(3e38**0.5))


@pytest.mark.parametrize("scoring", _C.SCORINGS)
def test_the_bits_do_not_depend_on_threads(scoring: str) -> None:
    logits = torch.randn(4000, 160)
    same_for_any_threads(lambda: lowbit.route(logits, 6, scoring=scoring, groups=8, groups_kept=3, normalize=True))


def test_no_tokens_and_any_strides() -> None:
    weights, index = lowbit.route(torch.randn(0, 8), 2)
    assert weights.shape == index.shape == (0, 2) and index.dtype == torch.int64
    logits, correction = torch.randn(30, 6).T, torch.randn(60)[::2]
    for ours, theirs in zip(
        lowbit.route(logits, 4, correction=correction),
        lowbit.route(logits.contiguous(), 4, correction=correction.contiguous()),
        strict=True,
    ):
        assert ours.equal(theirs)


@pytest.mark.parametrize("scoring", _C.SCORINGS)
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_the_gradient_is_that_of_the_formula(scoring: str, number: int) -> None:
    options = made(VARIANTS[number], 24)
    logits = torch.randn(7, 24, requires_grad=True)
    leaves = [logits] + [options[name].requires_grad_() for name in ("expert_scale",) if name in options]
    weights, index = lowbit.route(logits, 5, scoring=scoring, **options)
    assert not index.requires_grad
    wanted = weights_of(logits, index, scoring, **some(options, WEIGHTING))
    grad = torch.randn(7, 5)
    found = torch.autograd.grad(weights, leaves, grad, create_graph=True)
    expected = torch.autograd.grad(wanted, leaves, grad.double(), create_graph=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    again = torch.randn(7, 24)
    second = torch.autograd.grad((found[0] * again).sum(), logits)[0]
    torch.testing.assert_close(second, torch.autograd.grad((expected[0] * again).sum(), logits)[0], rtol=1e-3, atol=1e-4)


def test_gradients_of_half_logits_and_none_for_the_correction() -> None:
    logits = torch.randn(4, 12, dtype=torch.bfloat16, requires_grad=True)
    correction = torch.randn(12, requires_grad=True)
    weights, _ = lowbit.route(logits, 3, correction=correction)
    weights.sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and correction.grad is None
    assert not lowbit.route(logits.detach(), 3, correction=correction)[0].requires_grad
    with pytest.raises(NotImplementedError, match="route"):
        torch.func.jvp(lambda x: lowbit.route(x, 3)[0], (logits.detach(),), (torch.ones(4, 12).bfloat16(),))


@pytest.mark.parametrize("change, error, text", [
    ({"logits": torch.randn(2, 8).double()}, TypeError, "logits must be float32, bfloat16 or float16, got float64"),
    ({"logits": torch.randn(8)}, ValueError, r"logits must have shape \[T, E\], E at least 1, got \[8\]"),
    ({"logits": torch.randn(2, 0)}, ValueError, r"logits must have shape \[T, E\], E at least 1, got \[2, 0\]"),
    ({"correction": torch.randn(7)}, ValueError, r"correction must have shape \[8\], got \[7\]"),
    ({"correction": torch.zeros(8, dtype=torch.int32)}, TypeError, "correction must be float32, bfloat16 or float16"),
    ({"expert_scale": torch.randn(1, 8)}, ValueError, r"expert_scale must have shape \[8\], got \[1, 8\]"),
    ({"k": 0}, ValueError, r"k must be 1 to 8 \(the number of experts\), got 0"),
    ({"k": 9}, ValueError, r"k must be 1 to 8 \(the number of experts\), got 9"),
    ({"scoring": 5}, ValueError, r"scoring must be 0\.\.4, got scoring=5"),
    ({"groups": 3}, ValueError, "groups must divide the 8 experts, got 3"),
    ({"groups": 0}, ValueError, "groups must divide the 8 experts, got 0"),
    ({"groups_kept": 2}, ValueError, r"groups_kept must be 1 to 1 \(the number of groups\), got 2"),
    ({"groups": 4, "group_top": 3}, ValueError, r"group_top must be 1 to 2 \(the experts of a group\), got 3"),
    ({"groups": 4, "k": 3}, ValueError, "k must be at most 2, the experts of the 1 groups that are kept, got 3"),
    ({"eps": -1.0}, ValueError, "eps must be finite and not negative, got -1"),
    ({"least": float("nan")}, ValueError, "least must be finite and not negative, got nan"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, {"logits": torch.randn(2, 8), "k": 2, "scoring": 0} | change, error, f"route: {text}")


def test_a_scoring_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="route: scoring must be one of softmax, sigmoid, .* got 'tanh'"):
        lowbit.route(torch.randn(2, 8), 2, scoring="tanh")


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, number: int) -> None:
    more = ((), (torch.randn(20), 4, 2, 2, False, True, 1e-20, 0.0, 2.5, torch.randn(20)))[number]
    torch.library.opcheck(op.default, (torch.randn(20, 6).T.to(dtype), 3, 1, *more))


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda logits: lowbit.route(logits, 3, normalize=True), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for tokens in (3, 5, 17):
        logits = torch.randn(tokens, 20)
        for ours, theirs in zip(compiled(logits), lowbit.route(logits, 3, normalize=True), strict=True):
            assert ours.equal(theirs)
    assert len(graphs) == 1
