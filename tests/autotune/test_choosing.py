# SPDX-License-Identifier: Apache-2.0
"""Choices from times and errors that are given: nothing is measured here."""

from __future__ import annotations

import math

import pytest

from lowbit.autotune.choosing import (
    choose,
    fastest_within,
    hold_model_bound,
    more_exact,
    never_slower,
    noise_of,
    one_format,
    seconds_of,
)
from lowbit.autotune.options import Option
from lowbit.formats import LinearSpec

FAST, MIDDLE, EXACT = LinearSpec("int4", 32), LinearSpec("int8"), LinearSpec("float32")


class Layer:
    """The part of a MeasuredLayer that choosing uses."""

    def __init__(self, name: str, *options: tuple[LinearSpec | None, float, float]) -> None:
        self.name = name
        self.options = [Option(spec, "", seconds, 1) for spec, seconds, _ in options]
        self._db = {option: error_db for option, (*_, error_db) in zip(self.options, options, strict=True)}
        self.as_float = self.options[-1]
        self.formats = {option.spec: option for option in self.options[:-1]}
        self.errors: dict[LinearSpec, float] = {}

    def in_format(self, spec: LinearSpec) -> Option:
        return self.formats.get(spec, self.as_float)

    def error_db(self, option: Option) -> float:
        return self._db[option]


def layer(name: str, fast_db: float = 15.0, middle_seconds: float = 2.0) -> Layer:
    return Layer(name, (FAST, 1.0, fast_db), (MIDDLE, middle_seconds, 35.0), (EXACT, 8.0, 140.0), (None, 10.0, math.inf))


def model_db(choice):
    """As if the noise of the layers came out added up."""
    noise = sum(noise_of(layer.error_db(option)) for layer, option in choice.items())
    return -10 * math.log10(noise) if noise else math.inf


def above(bound, measured=model_db):
    return lambda choice: measured(choice) - bound


@pytest.mark.parametrize(("bound", "spec"), [(10, FAST), (15, FAST), (15.1, MIDDLE), (100, EXACT), (150, None)])
def test_the_fastest_option_that_holds_the_bound_is_taken(bound, spec):
    assert fastest_within(layer("a"), bound).spec == spec


def test_a_layer_whose_output_is_not_finite_is_passed_over():
    broken = layer("a", fast_db=math.nan)
    assert fastest_within(broken, -math.inf).spec == MIDDLE
    assert [option.spec for option in more_exact(broken, broken.options[0])] == [MIDDLE, EXACT, None]


def test_more_exact_skips_options_that_are_slower_and_no_better():
    odd = Layer("a", (FAST, 1.0, 30.0), (MIDDLE, 2.0, 25.0), (EXACT, 3.0, 31.0), (None, 10.0, math.inf))
    assert [option.spec for option in more_exact(odd, odd.options[0])] == [EXACT, None]
    assert more_exact(odd, odd.as_float) == []


def test_the_layer_moves_first_that_gives_back_most_noise_for_its_time():
    noisy, cheap, dear = layer("noisy", 10.0), layer("cheap", 12.0, 1.1), layer("dear", 12.0, 6.0)
    start = {it: it.options[0] for it in (noisy, cheap, dear)}
    # 0.1 + 0.063 + 0.063: the cheap move is not enough (0.163), the noisy layer's comes next (0.063).
    choice = hold_model_bound(start, above(11.0), 10)
    assert [choice[it].spec for it in (noisy, cheap, dear)] == [MIDDLE, MIDDLE, FAST]
    assert model_db(choice) >= 11.0
    assert [option.spec for option in start.values()] == [FAST] * 3, "what was handed over stays"


@pytest.mark.parametrize("bound", [5.0, 12.0, 25.0, 40.0, 130.0, 1000.0])
@pytest.mark.parametrize("factor_db", [-6.0, 0.0, 9.0])
@pytest.mark.parametrize("runs", [1, 4, 100])
def test_the_bound_of_the_model_always_holds_in_the_end(bound, factor_db, runs):
    layers = [layer(str(i), 8.0 + i, 1.5 + i) for i in range(6)]
    asked = []

    def measured(choice):
        asked.append(choice)
        return model_db(choice) + factor_db

    choice = hold_model_bound({it: it.options[0] for it in layers}, above(bound, measured), runs)
    assert model_db(choice) + factor_db >= bound
    assert len(asked) <= 25


def test_a_layer_that_the_output_depends_on_most_moves_first():
    loud, quiet = layer("loud", 20.0), layer("quiet", 12.0)
    factor = {loud: 20.0, quiet: 0.01}

    def measured(choice):
        noise = sum(factor[it] * noise_of(it.error_db(option)) for it, option in choice.items())
        return -10 * math.log10(noise) if noise else math.inf

    choice = hold_model_bound({it: it.options[0] for it in (loud, quiet)}, above(20.0, measured), 10)
    assert [choice[it].spec for it in (loud, quiet)] == [MIDDLE, FAST] and measured(choice) >= 20.0


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_model_output_that_is_not_finite_gives_every_layer_back(value):
    layers = [layer("a"), layer("b")]
    measured = lambda choice: math.inf if all(it.spec is None for it in choice.values()) else value  # noqa: E731
    choice = hold_model_bound({it: it.options[0] for it in layers}, measured, 10)
    assert all(it.spec is None for it in choice.values())


def test_a_layer_whose_noise_is_not_seen_counts_a_tenth_of_the_mean():
    lucky, plain = layer("lucky", 15.0), layer("plain", 15.0)

    def measured(choice):  # of the lucky layer alone nothing is seen
        noise = sum(noise_of(it.error_db(option)) for it, option in choice.items())
        alone = choice[plain].spec is None
        return math.inf if alone or not noise else -10 * math.log10(noise)

    choice = hold_model_bound({it: it.options[0] for it in (lucky, plain)}, above(14.0, measured), 10)
    assert [choice[it].spec for it in (lucky, plain)] == [FAST, MIDDLE]
    choice = hold_model_bound({it: it.options[0] for it in (lucky, plain)}, above(30.0, measured), 10)
    assert [choice[it].spec for it in (lucky, plain)] == [MIDDLE, MIDDLE]


def test_a_model_that_is_faster_keeps_its_choice():
    one = layer("a")
    choice, before, after = never_slower({one: one.options[0]}, lambda choice: (10.0, 9.0))
    assert choice[one].spec == FAST and (before, after) == (10.0, 9.0)


def test_a_model_that_is_slower_is_asked_again_and_then_left_as_it_is():
    layers = [layer(str(i)) for i in range(5)]
    start = {it: it.options[1] for it in layers}
    times = [(10.0, 12.0), (10.0, 11.0), (10.0, 9.0)]
    choice, before, after = never_slower(start, lambda choice: times.pop(0))
    assert choice == start and (before, after) == (10.0, 9.0), "what another program did is passed over"
    choice, before, after = never_slower(start, lambda choice: (10.0, 10.1))
    assert all(it.spec is None for it in choice.values()) and before == after == 10.0


def test_one_format_is_the_fastest_that_holds_the_bounds_in_every_layer_and_the_model(subtests):
    layers = [layer("a", 25.0), layer("b", 25.0), layer("c", 19.0)]
    for bound, spec in [(15.0, FAST), (20.0, MIDDLE), (100.0, EXACT)]:
        with subtests.test(bound=bound):
            assert {option.spec for option in one_format(layers, above(bound), bound).values()} == {spec}
    assert {it.spec for it in one_format(layers, lambda choice: -1.0, 15.0).values()} == {None}
    layers[0].formats.pop(MIDDLE)
    assert [it.spec for it in one_format(layers, above(20.0), 20.0).values()] == [None, MIDDLE, MIDDLE], "slower there than float"


def test_many_formats_have_to_win_more_than_the_times_differ():
    layers = [layer("a", 25.0), layer("b", 25.0), layer("c", 19.0)]  # one format: 3 * 2 s; mixed: 1 + 1 + 2 s
    assert [it.spec for it in choose(layers, lambda choice: math.inf, 20.0, 10, 1.4).values()] == [FAST, FAST, MIDDLE]
    assert {it.spec for it in choose(layers, lambda choice: math.inf, 20.0, 10, 1.6).values()} == {MIDDLE}
    # The model's bound takes back what mixing wins.
    assert {it.spec for it in choose(layers, above(25.5), 25.5, 10, 1.4).values()} == {MIDDLE}


@pytest.mark.parametrize("bound", [5.0, 20.0, 33.0, 60.0, 1000.0])
@pytest.mark.parametrize("margin", [1.03, 1.3, 50.0])
def test_what_is_chosen_holds_the_bounds_and_is_no_slower_than_one_format(bound, margin):
    layers = [layer(str(i), 8.0 + 3 * i, 1.5 + i / 2) for i in range(6)]
    choice = choose(layers, above(bound), bound, 10, margin)
    assert model_db(choice) >= bound and all(it.error_db(option) >= bound for it, option in choice.items())
    assert seconds_of(choice) <= seconds_of(one_format(layers, above(bound), bound))
