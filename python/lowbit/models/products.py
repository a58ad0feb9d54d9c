# SPDX-License-Identifier: Apache-2.0
"""The function that writes several projections of one input as steps of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lowbit.models.steps import Steps
from lowbit.quant.lora_layers import base_of


def projected(steps: Steps, merged: Any, projections: Sequence[nn.Module], x: int) -> int:
    """Write the projections as one product, or as several products into column ranges of one tensor."""
    if len(projections) == 1:
        return steps.product(projections[0], x)
    linears, added = [*map(base_of, projections)], steps.adapters(projections, x)
    if merged.holds(linears):
        steps.note(merged.__dict__, "weight", "bias")
        parameters = (parameter for linear in linears for parameter in (linear.weight, linear.bias))
        steps.note_addresses([parameter for parameter in parameters if parameter is not None])
        for linear in linears:
            steps.note_linear(linear)
        return steps.linear(merged.weight, merged.bias, merged.op_args, linears[0].row_number, x, added)
    steps.merged = False
    whole, at = steps.program.columns(x, sum(linear.out_features for linear in linears)), 0
    for linear, adapter in zip(linears, added, strict=True):
        steps.product_with(adapter, linear, x, into=whole, first_column=at)
        at += linear.out_features
    return whole
