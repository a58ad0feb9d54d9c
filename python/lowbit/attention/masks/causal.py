# SPDX-License-Identifier: Apache-2.0
"""Each query sees itself and the keys before it."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


causal = MaskMod(_causal, "causal")
