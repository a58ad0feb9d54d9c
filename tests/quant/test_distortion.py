# SPDX-License-Identifier: Apache-2.0
"""decibel: the ratio of two sums of squares, also where one of them is no number to divide by."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.autotune.options import sqnr_db
from lowbit.quant.report import decibel


@pytest.mark.parametrize(
    "signal, noise, wanted",
    [(100, 1, 20), (1, 1000, -30), (1, 0, math.inf), (0, 0, math.inf), (0, 1, -math.inf), (1, math.inf, -math.inf), (1e-300, 1e30, -3300)],
)
def test_decibel(signal: float, noise: float, wanted: float) -> None:
    assert decibel(signal, noise) == pytest.approx(wanted)


def test_what_is_not_known_stays_so() -> None:
    assert math.isnan(decibel(math.nan, math.nan)) and math.isnan(decibel(1, math.nan))


def test_an_output_with_inf_is_infinitely_wrong() -> None:
    assert sqnr_db(torch.ones(3), torch.tensor([1, 1, math.inf])) == -math.inf
