# SPDX-License-Identifier: Apache-2.0
"""The timer with a clock of its own: rounds, the best sample, what lies between two calls."""

from __future__ import annotations

import pytest
import torch

from lowbit.autotune import timing
from lowbit.autotune.timing import ROUNDS, Timed, Timer, last_cache_bytes


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


def test_the_best_sample_of_each_counts(clock):
    calls = {"a": Timed(clock.call("a", 3.0, 2.0, 5.0)), "b": Timed(clock.call("b", 1.5, 4.0))}
    assert Timer().best(calls) == {"a": pytest.approx(2.0), "b": pytest.approx(1.5)}
    assert clock.order.count("a") == clock.order.count("b") == 2 + ROUNDS[0], "the budget is spent"


def test_rounds_go_on_in_changing_order_until_each_best_sample_was_seen_twice(clock):
    calls = {name: Timed(clock.call(name, 0.001)) for name in "abc"}
    calls["d"] = Timed(clock.call("d", *(0.1 * 0.9**i for i in range(10)), 0.01, 0.02, 0.01), kind="slow")
    assert Timer().best(calls)["d"] == pytest.approx(0.01)
    rounds = [tuple(clock.order[i : i + 4]) for i in range(8, len(clock.order), 4)]
    assert len(rounds) == 11 and len(set(rounds)) > 1 and all(sorted(it) == list("abcd") for it in rounds)


def test_calls_that_never_agree_get_no_more_than_the_most_rounds(clock):
    Timer().best({"a": Timed(clock.call("a", *(1e-3 * 0.9**i for i in range(200))))})
    assert clock.order.count("a") == 2 + ROUNDS[1]


def test_a_hopeless_row_of_a_format_gets_no_rounds_and_the_best_of_a_slow_format_does(clock):
    calls = {
        "quick": Timed(clock.call("quick", 0.001), kind="int4"),
        "hopeless": Timed(clock.call("hopeless", 0.01), kind="int4"),
        "slow": Timed(clock.call("slow", 0.01), kind="float"),
    }
    best = Timer().best(calls)
    assert clock.order.count("hopeless") == 2 and clock.order.count("slow") == 2 + ROUNDS[0] and best["hopeless"] == pytest.approx(0.01)


def test_so_many_bytes_are_read_before_each_call_up_to_twice_the_cache(monkeypatch):
    read = []
    monkeypatch.setattr(timing, "last_cache_bytes", lambda: 4000)
    monkeypatch.setattr(torch.Tensor, "sum", lambda tensor: read.append(tensor.nbytes))
    calls = {"a": (1000, "a"), "b": (80000, "b"), "c": (0, "c")}
    Timer().best({name: Timed(lambda: None, *between_and_kind) for name, between_and_kind in calls.items()})
    assert set(read) == {1000, 8000} and len(read) == 2 * (2 + ROUNDS[0])


def test_no_calls_take_no_time():
    assert Timer().best({}) == {}


def test_the_cache_has_a_plausible_size():
    assert 1 << 15 <= last_cache_bytes() < 1 << 33
