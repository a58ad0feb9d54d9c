# SPDX-License-Identifier: Apache-2.0
"""Searched scales: never worse than those of the range in any group, exact where that is possible, the same bytes on
every row, and as good as the float64 reference's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.reference import layout
from lowbit.reference.search import grouped, search

FORMATS = testing.formats_of_kind("integer")
MAPPINGS = ("symmetric", "asymmetric")
CASES = [
    (format, group_size, mapping) for format in FORMATS for group_size in (0, 32, 64, 256) for mapping in MAPPINGS
] + [(format, group_size, "symmetric") for format in testing.formats_of_kind("lookup") for group_size in (0, 32, 64)]
ROWS = [str(row["name"]) for row in testing.rows("quantize") if row["available"]]
SHAPES = ((1, 1), (17, 70), (3, 300), (21, 130))


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


def weights(n: int, k: int) -> Iterator[tuple[str, Tensor]]:
    """Weights that a search may meet, by name."""
    normal = torch.randn(n, k)
    yield "normal", normal
    yield "small and large rows", normal * 10.0 ** torch.linspace(-30, 30, n)[:, None]
    yield "small and large columns", normal * 10.0 ** torch.linspace(-12, 12, k)
    yield "zeros", torch.zeros(n, k)
    yield "constant", torch.full((n, k), 0.3)
    yield "subnormal", normal * 1e-40
    yield "huge", normal.clamp(-3, 3) * 1e38
    yield "one outlier", torch.where(torch.arange(k) == k // 2, 100.0, normal)
    yield "heavy tails", torch.distributions.StudentT(1.5).sample((n, k)).clamp(-1e4, 1e4)
    yield "one-sided", normal.abs() + 5
    yield "mostly zero", normal * (torch.rand(n, k) > 0.9)


def decode(packed: Tensor, n: int, k: int, format: str, group_size: int, mapping: str) -> Tensor:
    return layout.unpack(packed, n, k, format, group_size, mapping == "asymmetric").decode()


def errors(weight: Tensor, decoded: Tensor, group_size: int, importance: Tensor | None) -> Tensor:
    """Of each group, float64 ``[n, groups]``."""
    h = 1 if importance is None else grouped(importance.double()[None], group_size)
    return (h * grouped(weight.double() - decoded, group_size).square()).sum(2)


def by_every_row(weight: Tensor, *how: object) -> Tensor:
    """`testing.pack_weight` by every row, which write the same bytes."""
    packed = []
    for row in ROWS:
        with lowbit.force_kernel(row):
            packed.append(testing.pack_weight(weight, *how))
        assert _C.last_kernel("quantize") == row and torch.equal(packed[-1], packed[0]), row
    return packed[0]


@pytest.mark.parametrize("format, group_size, mapping", CASES)
def test_rows_write_the_same_bytes_and_no_group_is_worse_than_with_the_scale_of_its_range(
    format: str, group_size: int, mapping: str, subtests: pytest.Subtests
) -> None:
    for i, (n, k) in enumerate(SHAPES):
        for j, (name, weight) in enumerate(weights(n, k)):  # each with and without importance in two of the shapes
            with subtests.test(what=name, n=n, k=k):
                importance = torch.where(torch.rand(k) > 0.3, torch.rand(k) ** 4, 0.0) if (i + j) % 2 else None
                by_search = by_every_row(weight, format, group_size, mapping, "search", importance)
                by_range = by_every_row(weight, format, group_size, mapping)
                after, before = (
                    errors(weight, decode(packed, n, k, format, group_size, mapping), group_size, importance)
                    for packed in (by_search, by_range)
                )
                largest = grouped(weight.double(), group_size).abs().amax(2).square() * 2.0**-40  # float32 steps
                assert (after <= before * (1 + 1e-5) + largest).all(), (name, n, k)


@pytest.mark.parametrize("format, group_size, mapping", [case for case in CASES if case[0] in FORMATS])
def test_the_error_is_that_of_the_reference(format: str, group_size: int, mapping: str, subtests: pytest.Subtests) -> None:
    """A candidate that is as good as another may be taken for it: a thousandth of the whole in int4. With more bits
    more of them are alike."""
    budget, alike = (1e-2, 0.8) if _C.FORMAT_FACTS[format]["bits"] > 4 else (1e-3, 0.9)
    for importance in (None, torch.rand(330) ** 2):
        with subtests.test(importance=importance is not None):
            weight = torch.randn(40, 330)
            packed = by_every_row(weight, format, group_size, mapping, "search", importance)
            wanted = search(weight, format, group_size, mapping, importance)
            got = layout.unpack(packed, 40, 330, format, group_size, mapping == "asymmetric")
            error, reference = (errors(weight, of.decode(), group_size, importance) for of in (got, wanted))
            assert float(error.sum()) == pytest.approx(float(reference.sum()), rel=budget)
            assert torch.isclose(got.scale, wanted.scale, rtol=1e-5).float().mean() >= alike


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize("group_size", [0, 32, 128])
def test_multiples_of_one_scale_come_back_exactly(row: str, group_size: int, most: int, subtests: pytest.Subtests) -> None:
    """In int4: up to 7 steps on both sides and an eighth on one, and 15 of any offset when asymmetric."""
    steps = torch.randint(-most, most + (most < 8), (20, 200)).float()
    steps[:, ::32], steps[:, 1::32] = -most, min(most, 7)
    for sign in (1, -1):
        with subtests.test(sign=sign):
            weight = sign * steps * torch.tensor([0.25, 3.0, 2.0**-20, 1e3]).repeat(5)[:, None]
            packed = testing.pack_weight(weight, "int4", group_size, "symmetric", "search")
            assert torch.equal(decode(packed, 20, 200, "int4", group_size, "symmetric").float(), weight)
    steps = torch.randint(0, 2 * most, (20, 200)).float() - torch.randint(0, 2 * most, (20, 1))
    steps[:, ::32] = 0
    weight = steps * 0.375
    packed = testing.pack_weight(weight, "int4", group_size, "asymmetric", "search")
    assert torch.equal(decode(packed, 20, 200, "int4", group_size, "asymmetric").float(), weight)


def test_a_scale_of_the_largest_weights_stays_finite_in_the_reference() -> None:
    """Two bits: the best scale is that of the weights, 2^128 as it would be stored; with four no scale is as large."""
    weight = torch.finfo(torch.float32).max * torch.tensor([1.0, -1, 0, 1] * 8)[None]
    found = search(weight, "int2", 32, "symmetric")
    assert found.column_scale == 2.0**127 and found.scale.isfinite().all() and found.decode().isfinite().all()
    smaller = search(weight / 4, "int2", 32, "symmetric")
    assert smaller.column_scale == 2.0**126 and torch.equal(smaller.decode(), (weight.double() / 4).sign() * 2.0**126)


def test_without_any_importance_scales_are_those_of_the_range(row: str, subtests: pytest.Subtests) -> None:
    weight = torch.randn(20, 100)
    for mapping in MAPPINGS:
        with subtests.test(mapping):
            packed = testing.pack_weight(weight, "int4", 32, mapping, "search", torch.zeros(100))
            assert torch.equal(packed, testing.pack_weight(weight, "int4", 32, mapping))


def test_importance_counts_by_its_ratios_alone(row: str, subtests: pytest.Subtests) -> None:
    weight, importance = torch.randn(20, 100), torch.rand(100) + 0.1
    packed = testing.pack_weight(weight, "int4", 32, "symmetric", "search", importance)
    for factor in (2.0**-100, 2.0**120):
        with subtests.test(factor=factor):
            again = testing.pack_weight(weight, "int4", 32, "symmetric", "search", importance * factor)
            assert torch.equal(again, packed)
    assert not torch.equal(testing.pack_weight(weight, "int4", 32, "symmetric", "search"), packed)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_signal_and_noise_are_those_of_what_was_packed(row: str, mapping: str) -> None:
    weight, importance = torch.randn(40, 200), torch.rand(200) * 0.9 + 1  # over a power of two, which is 1
    packed = testing.empty_packed(40, 200, "int4", 32, mapping == "asymmetric")
    args = _C.FORMATS["int4"], 32, mapping == "asymmetric", _C.MAPPINGS[mapping], 1, importance
    signal, noise, absmax_noise = _C.quantize(weight, packed, *args)
    assert signal == pytest.approx(float((importance * weight.double().square()).sum()), rel=1e-5)
    plain = testing.pack_weight(weight, "int4", 32, mapping)
    for of, got in ((packed, noise), (plain, absmax_noise)):
        error = errors(weight, decode(of, 40, 200, "int4", 32, mapping), 32, importance)
        assert got == pytest.approx(float(error.sum()), rel=1e-4)
    assert noise < 0.95 * absmax_noise


def test_any_number_of_threads_gives_the_same_bytes() -> None:
    weight = torch.randn(200, 96)
    same_for_any_threads(lambda: testing.pack_weight(weight, "int4", 32, "symmetric", "search"))
