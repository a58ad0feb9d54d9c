# SPDX-License-Identifier: Apache-2.0
"""sample: greedy answers, and draws of every row against the probabilities of transformers' processors; equal draws
whatever the threads and the row; what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.reference.sample import probabilities

op = torch.ops.lowbit.sample
ROWS = testing.rows("sample")
sample_row = fixture_of(ROWS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "repetition_penalty": 1.3},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_p": 0.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.03, "temperature": 0.9, "repetition_penalty": 0.8},
)


def transformers_probabilities(logits: Tensor, ids: Tensor, **settings: Any) -> Tensor:
    """Of the processors that generate makes, of float64 logits."""
    from transformers.generation import logits_process as processors

    def of(name: str, kind: Any, off: float) -> list[Any]:
        return [kind(settings[name])] if settings.get(name, off) != off else []

    scores = logits.double()
    for processor in (
        of("repetition_penalty", processors.RepetitionPenaltyLogitsProcessor, 1.0)
        + of("temperature", processors.TemperatureLogitsWarper, 1.0)
        + of("top_k", processors.TopKLogitsWarper, 0)
        + of("top_p", processors.TopPLogitsWarper, 1.0)
        + of("min_p", processors.MinPLogitsWarper, 0.0)
    ):
        scores = processor(ids, scores)
    return scores.softmax(-1)


def assert_drawn(counts: Tensor, wanted: Tensor) -> None:
    """Nothing without a probability is drawn, and chi-square is within 6 standard deviations; tokens of which fewer
    than 5 are expected are one class."""
    assert (counts[wanted == 0] == 0).all()
    expected = wanted * counts.sum()
    large = expected >= 5
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    found = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    some = expected >= 1
    degrees = max(int(some.sum()) - 1, 1)
    assert float(((found - expected)[some] ** 2 / expected[some]).sum()) < degrees + 6 * math.sqrt(2 * degrees) + 6


def drawn(logits: Tensor, ids: Tensor | None = None, draws: int = 4096, **settings: Any) -> Tensor:
    """How often each token is drawn for one row of logits, by positions and by rows."""
    rows = int(draws**0.5)
    many = logits.expand(rows, -1)
    many_ids = None if ids is None else ids.expand(rows, -1)
    tokens = [lowbit.sample(many, many_ids, seed=5, position=position, **settings) for position in range(rows)]
    return torch.cat(tokens).bincount(minlength=logits.shape[1])


@pytest.mark.core
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_draws_of_every_row_have_the_probabilities(sample_row: str, number: int, subtests: pytest.Subtests) -> None:
    settings = SETTINGS[number]
    for vocabulary, dtype in zip((1, 13, 100, 1543), (*DTYPES, torch.float32), strict=True):
        with subtests.test(vocabulary=vocabulary):
            torch.manual_seed(vocabulary)
            logits = (torch.randn(1, vocabulary) * 2).to(dtype)
            ids = torch.randint(0, vocabulary, (1, 9)) if "repetition_penalty" in settings else None
            with forced(sample_row):
                counts = drawn(logits, ids, **settings)
            assert_drawn(counts, probabilities(logits, ids, **settings)[0])


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_the_probabilities_are_those_of_transformers(number: int) -> None:
    pytest.importorskip("transformers")
    settings = SETTINGS[number]
    for vocabulary in (13, 1543):
        logits = torch.randn(20, vocabulary) * 2
        ids = torch.randint(0, vocabulary, (20, 9))
        given = ids if "repetition_penalty" in settings else None
        wanted = transformers_probabilities(logits, ids, **settings)
        torch.testing.assert_close(probabilities(logits, given, **settings), wanted)


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.02}], ids=str)
def test_of_a_large_vocabulary_no_other_tokens_than_those_of_transformers_are_drawn(settings: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    logits = torch.randn(1, 256_000) * 3
    wanted = transformers_probabilities(logits, torch.zeros(1, 1, dtype=torch.int64), **settings)[0]
    assert_drawn(drawn(logits, draws=256, **settings), wanted)


def test_equal_logits_count_as_in_transformers(sample_row: str) -> None:
    """All that are equal to the k-th largest stay; of those at the limit of top-p, the last ones."""
    logits = torch.tensor([[1.0, 2, 1, 2, 0, 1, 1, -1]])
    for settings, kept in (
        ({"top_k": 3}, {0, 1, 2, 3, 5, 6}),
        ({"top_k": 1}, {1, 3}),
        ({"top_p": 0.1}, {3}),
        ({"top_p": 0.6}, {1, 3, 6}),
        ({"top_p": 0.7}, {1, 3, 5, 6}),
        ({"top_k": 2, "top_p": 0.5}, {3}),
        ({"top_k": 2, "top_p": 0.51}, {1, 3}),
    ):
        with forced(sample_row):
            counts = drawn(logits, **settings)
        assert set(counts.nonzero().flatten().tolist()) == kept, settings
        assert set(probabilities(logits, **settings)[0].nonzero().flatten().tolist()) == kept
        assert_drawn(counts, probabilities(logits, **settings)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temperature_0_is_the_first_of_the_largest(sample_row: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 1031).to(dtype)
    logits[0, 7] = logits[0, 500] = logits[1, 1030] = 20
    logits[2] = -torch.inf
    logits[2, 40] = -5
    for settings in ({}, {"top_k": 3, "top_p": 0.5, "seed": 3}):
        with forced(sample_row):
            tokens = lowbit.sample(logits, temperature=0.0, **settings)
        assert tokens.tolist()[:3] == [7, 1030, 40] and tokens.equal(logits.float().argmax(-1))


def test_a_penalty_counts_once_for_each_token_and_padding_is_none(sample_row: str) -> None:
    logits = torch.tensor([[2.0, 1.5, -1, -1.2]] * 2)
    for dtype in (torch.int32, torch.int64):
        with forced(sample_row):
            tokens = lowbit.sample(logits, torch.tensor([[0, 0, -1], [-1, -1, -1]], dtype=dtype), temperature=0.0, repetition_penalty=1.25)
            assert tokens.tolist() == [0, 0]
            tokens = lowbit.sample(logits, torch.tensor([[0], [2]], dtype=dtype), temperature=0.0, repetition_penalty=1.5)
            assert tokens.tolist() == [1, 0]
            tokens = lowbit.sample(logits[:, 2:], torch.tensor([[0], [1]], dtype=dtype), temperature=0.0, repetition_penalty=1.5)
            assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_draws_do_not_depend_on_threads_or_the_row_and_its_instruction_set(number: int) -> None:
    settings = SETTINGS[number] | {"seed": -(2**60), "position": 2**40}
    logits = torch.randn(40, 2003) * 2
    ids = torch.randint(0, 2003, (40, 9)) if "repetition_penalty" in settings else None
    (tokens,) = same_for_any_threads(lambda: lowbit.sample(logits, ids, **settings))
    for row in ROWS:
        if row["available"]:
            with forced(str(row["name"])):
                assert lowbit.sample(logits, ids, **settings).equal(tokens), row["name"]


def test_another_seed_position_or_row_is_another_draw() -> None:
    logits = torch.zeros(1, 100_000).expand(3, -1)
    tokens = torch.stack([
        lowbit.sample(logits, seed=seed, position=position)
        for seed, position in ((0, 0), (1, 0), (2**40, 0), (-1, 0), (0, 1), (0, 2**40), (0, -1))
    ])  # fmt: skip
    assert len(tokens.unique()) == tokens.numel()


def test_logits_that_are_minus_infinity_are_never_drawn(sample_row: str) -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[0, 650], logits[1, 3], logits[1, 4], logits[2, ::7] = -3e38, 3e38, 3e38, 0
    for settings in ({}, {"top_k": 300, "top_p": 0.99999, "min_p": 0.5}, {"temperature": 1e-30}, {"temperature": 1e30}):
        for position in range(20):
            with forced(sample_row):
                tokens = lowbit.sample(logits, position=position, **settings).tolist()
            assert tokens[0] == 650 and tokens[1] in (3, 4) and tokens[2] % 7 == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value, got", [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "nothing but -inf")])
def test_logits_without_a_distribution_are_refused(sample_row: str, temperature: float, value: float, got: str) -> None:
    logits = torch.randn(4, 37)
    logits[2] = value
    text = f"sample: each row of logits must have a finite largest number and no nan, got {got} in row 2"
    with pytest.raises(ValueError, match=text), lowbit.force_kernel(sample_row):
        lowbit.sample(logits, temperature=temperature)
    if value == value and value < 0:
        return
    logits[2, 1:] = 0
    with pytest.raises(ValueError, match=f"got {got} in row 2"), lowbit.force_kernel(sample_row):
        lowbit.sample(logits, temperature=temperature)


@pytest.mark.parametrize("wrong", [-2, 8, 2**31 - 1])
def test_an_id_that_is_no_token_is_refused(wrong: int) -> None:
    ids = torch.tensor([[0, 1], [7, wrong]])
    with pytest.raises(ValueError, match=rf"sample: ids must be 0 to 7, or -1 for none, got ids\[1, 1\] = {wrong}"):
        lowbit.sample(torch.randn(2, 8), ids, repetition_penalty=1.1)


def test_no_rows_and_any_strides() -> None:
    assert lowbit.sample(torch.randn(0, 8)).shape == (0,)
    logits, ids = torch.randn(50, 6).T, torch.randint(0, 50, (4, 6)).T
    tokens = lowbit.sample(logits, ids, repetition_penalty=1.2)
    assert tokens.equal(lowbit.sample(logits.contiguous(), ids.contiguous(), repetition_penalty=1.2))
    assert tokens.dtype == torch.int64
    lowbit.sample(logits, ids[:, :0], repetition_penalty=1.2)


@pytest.mark.parametrize("change, error, text", [
    ({"logits": torch.randn(2, 8).double()}, TypeError, "logits must be float32, bfloat16 or float16, got float64"),
    ({"logits": torch.randn(8)}, ValueError, r"logits must have shape \[B, V\], V at least 1, got \[8\]"),
    ({"logits": torch.randn(2, 0)}, ValueError, r"logits must have shape \[B, V\], V at least 1, got \[2, 0\]"),
    ({"ids": torch.zeros(2, 3)}, TypeError, "ids must be int32 or int64, got float32"),
    ({"ids": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, r"ids must have shape \[B, L\], B = 2, got \[3, 3\]"),
    ({"temperature": -0.5}, ValueError, "temperature must be finite and not negative, got -0.5"),
    ({"temperature": float("inf")}, ValueError, "temperature must be finite and not negative, got inf"),
    ({"top_k": -1}, ValueError, "top_k must not be negative, got -1"),
    ({"top_p": 1.5}, ValueError, "top_p must be 0 to 1, got 1.5"),
    ({"top_p": float("nan")}, ValueError, "top_p must be 0 to 1, got nan"),
    ({"min_p": -0.1}, ValueError, "min_p must be 0 to 1, got -0.1"),
    ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be finite and positive, got 0"),
    ({"ids": None, "repetition_penalty": 1.1}, ValueError, "ids must be given with repetition_penalty=1.1"),
    ({"logits": torch.randn(2, 8).requires_grad_()}, NotImplementedError, "no argument may require a gradient"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"logits": torch.randn(2, 8), "ids": torch.zeros(2, 3, dtype=torch.int64)}
    refused_alike(lowbit.sample, good | change, error, f"sample: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    arguments = (torch.randn(20, 6).T.to(dtype), torch.randint(0, 20, (4, 6)).T, 0.7, 5, 0.9, 0.01, 1.1, 3, 4)
    torch.library.opcheck(op.default, arguments)


def test_one_graph_for_all_positions() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda logits, position: lowbit.sample(logits, top_k=5, position=position), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    logits = torch.randn(3, 50)
    for position in (3, 17, 400):
        assert compiled(logits, position).equal(lowbit.sample(logits, top_k=5, position=position))
    assert len(graphs) == 1
