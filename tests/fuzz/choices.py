# SPDX-License-Identifier: Apache-2.0
"""The stream of random choices that a case is made of, and how a failing case is made smaller: simpler choices, not simpler text.

Every choice is a number below some bound, and 0 is the simplest. A generator asks for the plain thing first in each list, so a
stream of zeros is the plainest case, and what is left out of a stream counts as zeros.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Random choices from a seed, or those of a list again; ``made`` holds them either way."""

    def __init__(self, seed: int | None = None, again: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        self._again = None if again is None else list(again)
        self.made: list[int] = []

    def below(self, bound: int) -> int:
        """Return a number of 0 .. bound - 1."""
        at = len(self.made)
        if self._again is None:
            number = self._random.randrange(bound)
        else:
            number = self._again[at] % bound if at < len(self._again) else 0
        self.made.append(number)
        return number

    def between(self, low: int, high: int) -> int:
        """Return a number of low .. high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, *options: T) -> T:
        """Return one of the options; repeat one to make it likelier."""
        return options[self.below(len(options))]

    def one_of(self, *makers: Callable[[], T]) -> T:
        """Return what one of the functions makes; the others are not called, and choose nothing."""
        return self.pick(*makers)()

    def chance(self, percent: int) -> bool:
        """Return True in so many of 100 cases."""
        return self.below(100) >= 100 - percent


def shrink(made: Sequence[int], fails: Callable[[list[int]], bool], seconds: float) -> list[int]:
    """Return simpler choices for which ``fails`` still holds, found within about so many seconds."""
    best, deadline, found = list(made), time.monotonic() + seconds, True
    while found:
        found = False
        for candidate in _simpler(best):
            if time.monotonic() > deadline:
                return best
            if fails(candidate):
                best, found = candidate, True
                break
    return best


def _simpler(made: list[int]) -> Iterator[list[int]]:
    for size in (32, 16, 8, 4, 2, 1):
        for at in range(0, len(made), size):
            yield made[:at] + made[at + size :]
            if any(made[at : at + size]):
                yield made[:at] + [0] * len(made[at : at + size]) + made[at + size :]
    for at, number in enumerate(made):
        for simpler in {number // 2, number - 1} if number > 1 else ():
            yield made[:at] + [simpler] + made[at + 1 :]
