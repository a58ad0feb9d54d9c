# SPDX-License-Identifier: Apache-2.0
"""SGD with 8-bit momentum: b = momentum b + (1 - dampening) g, p -= lr b."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lowbit.optim.base import LowBitOptimizer
from lowbit.optim.checks import check_number, check_switch


class SGD8bit(LowBitOptimizer):
    """SGD with 8-bit momentum, and the arguments of torch.optim.SGD.

    Args:
        params: float32, bfloat16 or float16 parameters on the CPU (DTensors too), or param groups.
        lr: learning rate, a float or a 0-dim tensor.
        momentum: momentum factor; with 0 there is no state.
        dampening: dampening of the gradient in the momentum, from the second step on.
        weight_decay: L2 penalty; weight_decay times the parameter is added to the gradient.
        nesterov: whether to use Nesterov momentum, which requires momentum and no dampening.
        block_size, bf16_stochastic_round, options: the same as for `AdamW8bit`.

    Raises:
        ValueError: an option is out of range, or the dtype or device of a parameter is not supported.
    """

    RULE = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults["nesterov"] = nesterov
        options |= {"block_size": block_size, "bf16_stochastic_round": bf16_stochastic_round}
        super().__init__(params, defaults, state_format="dynamic8", **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number(group["momentum"], "momentum value")
        check_number(group["dampening"], "dampening value", signed=True)
        check_switch(group["nesterov"], "nesterov")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
