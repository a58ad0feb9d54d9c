# SPDX-License-Identifier: Apache-2.0
"""Shapes of the gradients of gated_rms_norm, for tracing; gated_rms_norm.py calls the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def fake(x: Tensor, gate: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)
