# SPDX-License-Identifier: Apache-2.0
"""The row of a plan for one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.formats.spec import LinearSpec

BY_BYTES = "by bytes"
"""The note of a layer whose times were useless, so that they are assumed to be proportional to the size of the weight."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The row of one layer in a plan: a linear layer, or a module of experts.

    Args:
        layer: qualified name in the model.
        shape: (n, k), rows and columns of the weight; (experts, n, k) of the first weight of a module of experts.
        calls: (m, dtype of the activations, number of calls) for each recorded shape.
        spec: the format; None if the layer stays float.
        row: the preferred kernel row; empty for the default row, which experts always have.
        float_seconds, seconds: time in seconds of all these calls, by the float layer and in the format; 0 if the
            weight is shared, and another row counts it.
        error_db: SQNR in dB of the layer's output on the recorded inputs; inf for the float layer, nan if it was not
            called.
        bytes_before, bytes_after: size of the weights in bytes.
        note: the reason why the layer stays float, or another remark.
    """

    layer: str
    shape: tuple[int, ...]
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
    def left(cls, layer: str, shape: tuple[int, ...], bytes: int, note: str) -> PlanRow:
        """Return the row of a layer that was not measured."""
        return cls(layer, shape, (), None, "", 0.0, 0.0, math.nan, bytes, bytes, note)
