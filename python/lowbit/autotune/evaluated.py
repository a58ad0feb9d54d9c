# SPDX-License-Identifier: Apache-2.0
"""A figure that the user takes of the model, such as a loss or a perplexity, as the bound of the model as a whole.

Its rise above the float model's counts as noise: like the relative noise of the output, the rise of a loss is about the
sum of the layers' contributions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowbit.autotune.choosing import Choice
from lowbit.autotune.whole_model import changed

RUNS_S, RUNS = 60.0, 8  # seconds to find the layers that the rise comes from, and the least number of runs
AGREE = 0.01  # share of the allowed rise by which two figures of the float model may differ


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of ``evaluate`` for the float model and for the model with the plan, and the bound."""

    before: float
    after: float
    at_most: float


class Evaluated:
    """A model and its figure: the smaller, the better.

    Args:
        evaluate: called with the model, returns the figure.
        at_most: the largest that is allowed.
    """

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], Any], at_most: float) -> None:
        self.model, self.evaluate, self.at_most = model, evaluate, at_most
        self.before, self._run_s = math.nan, 0.0
        self._last: tuple[Choice, float] | None = None

    def run_float(self) -> None:
        """Take the figure of the model as it is, twice.

        Raises:
            TypeError: it is no number. ValueError: it is above the bound, or differs the second time.
        """
        start = time.perf_counter()
        self.before = self._figure()
        self._run_s = time.perf_counter() - start
        if not self.before < self.at_most:
            raise ValueError(
                f"autoquant: at_most must be more than evaluate gives for the float model, {self.before:.6g}, got "
                f"{self.at_most:.6g}"
            )
        again = self._figure()
        if not abs(again - self.before) <= AGREE * (self.at_most - self.before):
            raise ValueError(
                f"autoquant: evaluate must give the same twice for one model, got {self.before:.6g} and {again:.6g}, "
                f"and at most {self.at_most:.6g} is allowed"
            )

    @property
    def affordable_runs(self) -> int:
        """Runs that may find out which layers the rise comes from."""
        return max(RUNS, int(RUNS_S / max(self._run_s, 1e-9)))

    def room_db(self, choice: Choice) -> float:
        """The dB by which the rise with a choice stays below the allowed one; nan for a figure that is nan."""
        rise = self.figure(choice) - self.before
        return math.inf if rise <= 0 else 10 * math.log10((self.at_most - self.before) / rise)

    def figure(self, choice: Choice) -> float:
        """The figure of the model with the choice."""
        if all(option.spec is None for option in choice.values()):
            return self.before
        if self._last is None or self._last[0] != choice:
            with changed(self.model, choice):
                self._last = choice, self._figure()
        return self._last[1]

    def _figure(self) -> float:
        value = self.evaluate(self.model)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # float() of a tensor with many elements
            raise TypeError(f"autoquant: evaluate must return a number, got {type(value).__name__}") from None
