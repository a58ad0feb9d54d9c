# SPDX-License-Identifier: Apache-2.0
"""The row of a plan for one linear layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.formats.spec import LinearSpec


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One linear layer.

    Args:
        layer: qualified name in the model.
        shape: (n, k), the weight's rows and columns.
        calls: (m, dtype of the activations, times) of each shape that it saw.
        spec: the format; None: the float layer stays.
        row: the kernel row that it prefers; empty: the first that fits.
        float_seconds, seconds: the times of all these calls, by the float layer and in the format; 0 where another row
            already counts a shared weight.
        error_db: SQNR of the layer's output on the recorded inputs; inf for the float layer, nan if it was not called.
        bytes_before, bytes_after: the bytes of the weight.
        note: why it stays float, or another remark.
    """

    layer: str
    shape: tuple[int, int]
    calls: tuple[tuple[int, str, int], ...]
    spec: LinearSpec | None
    row: str
    float_seconds: float
    seconds: float
    error_db: float
    bytes_before: int
    bytes_after: int
    note: str = ""

    @classmethod
    def left(cls, layer: str, shape: tuple[int, int], bytes: int, note: str) -> PlanRow:
        """A layer that nothing was measured of."""
        return cls(layer, shape, (), None, "", 0.0, 0.0, math.nan, bytes, bytes, note)
