# SPDX-License-Identifier: Apache-2.0
"""A bound for the whole model on the user's own metric, such as a loss or a perplexity.

Its increase over the float model is treated as noise: like the relative noise of the output, the increase of a loss is
about the sum of the layers' contributions.
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

RUNS_S, RUNS = 60.0, 8  # time in seconds to attribute the increase to layers, and the min number of runs for it
AGREE = 0.01  # max difference of two results for the float model, as a fraction of the allowed increase


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of ``evaluate`` for the float model and for the model with the plan, and the bound."""

    before: float
    after: float
    at_most: float


class Evaluated:
    """A model and its metric, which is better the smaller it is.

    Args:
        model: the model.
        evaluate: called with the model; returns the metric.
        at_most: the max value that is allowed.
    """

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], Any], at_most: float) -> None:
        self.model, self.evaluate, self.at_most = model, evaluate, at_most
        self.before, self._run_s = math.nan, 0.0
        self._last: tuple[Choice, float] | None = None

    def run_float(self) -> None:
        """Compute the metric of the float model twice.

        Raises:
            TypeError: it is not a number.
            ValueError: it is not below the bound, or differs the second time.
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
        """The max number of runs to attribute the increase to layers."""
        return max(RUNS, int(RUNS_S / max(self._run_s, 1e-9)))

    def room_db(self, choice: Choice) -> float:
        """Return how far the increase with a choice is below the allowed increase, in dB; nan if the metric is nan."""
        rise = self.figure(choice) - self.before
        return math.inf if rise <= 0 else 10 * math.log10((self.at_most - self.before) / rise)

    def figure(self, choice: Choice) -> float:
        """Return the metric of the model with a choice."""
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
        except (TypeError, ValueError, RuntimeError):  # such as RuntimeError for a tensor with several elements
            raise TypeError(f"autoquant: evaluate must return a number, got {type(value).__name__}") from None
