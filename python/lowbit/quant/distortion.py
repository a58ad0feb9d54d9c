# SPDX-License-Identifier: Apache-2.0
"""How far a packed weight is from the float one: sums of squares, and their ratio in dB."""

from __future__ import annotations

import math
from dataclasses import dataclass


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf without a signal or with infinite noise, nan of nan."""
    if not noise or not signal:
        return -math.inf if noise else math.inf
    return 10 * (math.log10(signal) - math.log10(noise))  # the quotient may be 0


@dataclass(frozen=True, slots=True)
class Distortion:
    """Sums of squares of a weight, of its error, and of the error with the scales of its groups' ranges (absmax).

    Weighed by the inputs of the layer where they are known: by the mean of x^2, or for GPTQ by that of x x^T. nan on
    the meta device.
    """

    signal: float = math.nan
    noise: float = math.nan
    absmax_noise: float = math.nan

    @property
    def db(self) -> float:
        """10 log10(signal / noise); inf is exact."""
        return decibel(self.signal, self.noise)

    @property
    def absmax_db(self) -> float:
        """The same with absmax scales."""
        return decibel(self.signal, self.absmax_noise)
