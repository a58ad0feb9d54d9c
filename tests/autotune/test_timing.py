# SPDX-License-Identifier: Apache-2.0
"""The timer with a clock of its own: rounds, the best sample, what lies between two calls."""

from __future__ import annotations

import pytest
import torch

from lowbit.autotune import timing
from lowbit.autotune.timing import LEAST, Timed, Timer, Times, last_cache_bytes


@pytest.fixture
def clock(monkeypatch, short):
    """Seconds that calls put on it."""

    class Clock:
        now = 0.0
        order: list[str] = []

        def call(self, name: str, *seconds: float):
            """A call that takes these seconds in turn, then the last of them."""
            left = list(seconds)

            def run():
                self.now += left.pop(0) if len(left) > 1 else left[0]
                self.order.append(name)

            return run

    clock = Clock()
    clock.order = []
    monkeypatch.setattr(timing, "BUDGET_S", 3.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_best_sample_of_each_counts_and_halves_that_differ_are_noise(clock):
    calls = {"a": Timed(clock.call("a", 3.0, 2.0, 5.0)), "b": Timed(clock.call("b", 1.5, 4.5)), "c": Timed(clock.call("c", 1.0))}
    times = Timer().best(calls)
    assert times.seconds == {"a": pytest.approx(2.0), "b": pytest.approx(1.5), "c": pytest.approx(1.0)}
    assert times.noise == pytest.approx(1.5), "the median of 1.5, 3 and 1"
    assert clock.order == ["a", "b", "c"] * 2, "the first samples took all of the time"


def test_rounds_go_on_in_changing_order_until_the_halves_agree(clock):
    calls = {name: Timed(clock.call(name, 0.001)) for name in "abc"}
    calls["d"] = Timed(clock.call("d", *(0.1 * 0.9**i for i in range(10)), 0.01, 0.01, 0.02), kind="slow")
    times = Timer().best(calls)
    assert times.seconds["d"] == pytest.approx(0.01) and times.noise == pytest.approx(1.0)
    rounds = [tuple(clock.order[i : i + 4]) for i in range(0, len(clock.order), 4)]
    assert len(rounds) == 12 and len(set(rounds)) > 1 and all(sorted(it) == list("abcd") for it in rounds)


def test_calls_that_never_agree_end_with_their_share_of_the_time(clock):
    times = Timer().best({"a": Timed(clock.call("a", *(0.1 * (1 + i % 2) for i in range(99))))}, share=0.5)
    assert times.noise == pytest.approx(2.0) and 1.5 <= clock.now < 2.0, "half of the budget"


def test_a_hopeless_row_of_a_format_gets_no_rounds_nor_a_format_that_is_slower_than_its_rival(clock):
    calls = {
        "float": Timed(clock.call("float", 0.01), kind="float"),
        "quick": Timed(clock.call("quick", 0.001), kind="int4", rival="float"),
        "hopeless": Timed(clock.call("hopeless", 0.01), kind="int4", rival="float"),
        "slow": Timed(clock.call("slow", 0.02), kind="int8", rival="float"),
        "slower": Timed(clock.call("slower", 0.04), kind="fp4", rival="float"),
    }
    times = Timer().best(calls)
    assert [clock.order.count(name) for name in calls] == [2 * LEAST, 2 * LEAST, 2, 2 * LEAST, 2]
    assert times.seconds["hopeless"] == pytest.approx(0.01)


def test_so_many_bytes_are_read_before_each_call_up_to_twice_the_cache(monkeypatch):
    read = []
    monkeypatch.setattr(timing, "last_cache_bytes", lambda: 4000)
    monkeypatch.setattr(torch.Tensor, "sum", lambda tensor: read.append(tensor.nbytes))
    calls = {"a": (1000, "a"), "b": (80000, "b"), "c": (0, "c")}
    Timer().best({name: Timed(lambda: None, *between_and_kind) for name, between_and_kind in calls.items()})
    assert set(read) == {1000, 8000} and len(read) == 2 * 2


def test_no_calls_take_no_time():
    assert Timer().best({}) == Times({})


def test_the_cache_has_a_plausible_size():
    assert 1 << 15 <= last_cache_bytes() < 1 << 33
