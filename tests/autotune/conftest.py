# SPDX-License-Identifier: Apache-2.0
"""A timer without a clock: seconds by the name of a call, so that every choice is determined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowbit.autotune import timing
from lowbit.autotune.autoquant import PlanMaker
from lowbit.autotune.candidates import candidates_of
from lowbit.autotune.kept_times import KeptTimes
from lowbit.autotune.plan import Plan
from lowbit.autotune.seen_layer import record
from lowbit.autotune.timing import Times
from lowbit.autotune.tried_formats import TriedFormats

FLOAT_SECONDS = 10.0


class FakeTimer:
    """Calls "float" and the model before take 10 s; other names what ``seconds`` says of the first word in
    them, else 20.

    ``model`` is what a run of the changed model takes, or what its first runs take; the last of them counts
    for the rest.
    """

    def __init__(self, seconds: dict[str, float], model: float | list[float] = 1.0) -> None:
        self.seconds, self.model = seconds, model if isinstance(model, list) else [model]
        self.sets: list[list[str]] = []
        self.noise, self.taken = 1.0, 0.0

    def best(self, calls, share=1.0):
        for timed in calls.values():
            with timed.around():
                timed.call()  # as the real one does
        self.sets.append(list(calls))
        return Times({name: self._of(name) for name in calls}, self.noise, self.taken)

    def _of(self, name: str) -> float:
        if name in ("float", "before"):
            return FLOAT_SECONDS
        if name == "after":
            return self.model.pop(0) if len(self.model) > 1 else self.model[0]
        return next((value for words, value in self.seconds.items() if words in name), 20.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock does run, shortly, and as on a machine without other programs: no test asks for a time."""
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    monkeypatch.setattr(timing.OtherPrograms, "share", lambda self: 0.0)


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """autoquant with a FakeTimer, and no times kept in a file."""

    def make(model, example_input, candidates, seconds, min_sqnr=20.0, model_seconds=1.0, cache=False, filter_fn=None, noise=1.0, taken=0.0, recorded=False, whole=True, evaluate=None, at_most=None, head="int8", calibration=None):
        timer = FakeTimer(seconds, model_seconds)
        timer.noise, timer.taken = noise, taken
        formats = TriedFormats(candidates_of(candidates, None), head, calibration)
        maker = PlanMaker(formats, min_sqnr, KeptTimes(cache), timer)
        maker.raises, maker.evaluate, maker.at_most = True, evaluate, at_most
        layers = maker.layers_of(model, filter_fn)
        if recorded:
            record(model, layers, lambda: model(example_input))
        plan = maker.plan(model, layers, example_input if whole else None, recorded=recorded)
        plan.timer = timer
        return plan

    return make


class Block(nn.Module):
    """Three layers: one called twice, one never, one whose bias is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.never = nn.Linear(64, 64), nn.Linear(64, 48, bias=False), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(1))
