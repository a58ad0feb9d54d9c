# SPDX-License-Identifier: Apache-2.0
"""Lion with an 8-bit moment: p -= lr sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g (Chen et al., arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lowbit.optim.base import LowBitOptimizer


class Lion8bit(LowBitOptimizer):
    """Lion (Chen et al., arXiv 2302.06675) with an 8-bit moment.

    Args:
        params: float32, bfloat16 or float16 parameters on the CPU (DTensors too), or param groups.
        lr: learning rate, a float or a 0-dim tensor; typically a third to a tenth of AdamW's.
        betas: coefficients of the step's direction and of the moment, each in [0, 1).
        weight_decay: the parameter shrinks by lr * weight_decay.
        block_size, bf16_stochastic_round, options: the same as for `AdamW8bit`.

    Raises:
        ValueError: an option is out of range, or the dtype or device of a parameter is not supported.
    """

    RULE = "lion"
    DECOUPLED = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        options |= {"block_size": block_size, "bf16_stochastic_round": bf16_stochastic_round}
        super().__init__(params, defaults, state_format="dynamic8", **options)
