# SPDX-License-Identifier: Apache-2.0
"""The function that writes several projections of one input as steps of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.models.steps import Steps
from lowbit.quant.quant_linear import QuantLinear


def projected(steps: Steps, merged: Any, projections: Sequence[QuantLinear], x: int) -> int:
    """Write the projections as one product, or as several products into column ranges of one tensor."""
    if len(projections) == 1:
        return steps.product(projections[0], x)
    if merged.holds(projections):
        steps.note(merged.__dict__, "weight", "bias")
        parameters = (parameter for linear in projections for parameter in (linear.weight, linear.bias))
        steps.note_addresses([parameter for parameter in parameters if parameter is not None])
        for linear in projections:
            steps.note_linear(linear)
        return steps.linear(merged.weight, merged.bias, merged.op_args, projections[0].row_number, x)
    steps.merged = False
    whole, at = steps.program.columns(x, sum(linear.out_features for linear in projections)), 0
    for linear in projections:
        steps.product(linear, x, into=whole, first_column=at)
        at += linear.out_features
    return whole
