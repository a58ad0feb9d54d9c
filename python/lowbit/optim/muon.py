# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024; Liu et al., arXiv 2502.16982), with momentum in float32 or 8 bits.

b = momentum b + (1 - momentum) g;  p = p (1 - lr weight_decay) - lr ratio orthogonalize(b), or with Nesterov of
momentum b + (1 - momentum) g. The first formula is the rule "muon" of csrc/rules, and the second a step of "sgd".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.ops.optim import Step, StepLists, check, take
from lowbit.ops.tracing import is_traced
from lowbit.optim import sharding
from lowbit.optim.base import LowBitOptimizer
from lowbit.optim.checks import LARGEST_SEED, check_number, check_switch
from lowbit.optim.newton_schulz import fastest_dtype, orthogonalize

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_NS_DTYPES = (None, torch.float32, torch.bfloat16)
_MOST_STEPS = 99


class _Muon(LowBitOptimizer):
    """Base class of `Muon` and `Muon8bit`, with the arguments of torch.optim.Muon.

    Args:
        params: matrices, or param groups of them: float32, bfloat16 or float16, ``[m, n]``, or ``[experts, m, n]``,
            whose matrices are orthogonalized one by one. Give other parameters, and embeddings and heads, to
            `AdamW8bit`.
        lr: learning rate, a float or a 0-dim tensor.
        weight_decay: the parameter shrinks by lr * weight_decay.
        momentum: factor of the momentum.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: the coefficients a, b and c of a Newton-Schulz step.
        eps: the smallest norm that a matrix is divided by.
        ns_steps: number of Newton-Schulz steps, less than 100.
        adjust_lr_fn: "original" (the default, None): lr is multiplied by sqrt(max(1, m / n)); "match_rms_adamw": by
            0.2 sqrt(max(m, n)), so that lr and weight_decay of AdamW fit.
        ns_dtype: dtype of the Newton-Schulz steps, torch.bfloat16 or torch.float32. None: bfloat16, as in torch, where
            the processor multiplies it, otherwise float32.
        block_size, bf16_stochastic_round: the same as for `AdamW8bit`.
        options: the same as for `AdamW8bit`.

    Raises:
        ValueError: an option is out of range, or a parameter is not a matrix, is sharded, or has an unsupported dtype.
    """

    RULE = "muon"
    DECOUPLED = True
    STATE_FORMAT: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }  # fmt: skip
        options |= {"block_size": block_size, "bf16_stochastic_round": bf16_stochastic_round}
        super().__init__(params, defaults, state_format=self.STATE_FORMAT, **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        for name, text in (("lr", "Learning rate"), ("momentum", "momentum"), ("weight_decay", "weight decay")):
            if isinstance(group[name], Real) and group[name] < 0:
                raise ValueError(f"{text} should be >= 0 but is: {group[name]}")
        super()._check_group(group)
        check_number(group["momentum"], "momentum value")
        check_number(group["eps"], "epsilon value")
        check_switch(group["nesterov"], "nesterov")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
        coefficients, steps = group["ns_coefficients"], group["ns_steps"]
        if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
            raise ValueError("Coefficients must be a tuple of exactly 3 values")
        for index, coefficient in enumerate(coefficients):
            check_number(coefficient, f"ns_coefficients value at index {index}", signed=True)
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"Invalid ns_steps value: {steps!r}, must be a number of steps")
        if steps > _MOST_STEPS:
            raise ValueError("Number of steps must be less than 100 for computational efficiency")
        if group["ns_dtype"] not in _NS_DTYPES:
            raise ValueError(f"Invalid ns_dtype value: {group['ns_dtype']!r}, must be torch.float32 or torch.bfloat16")

    def _check_param(self, param: Tensor, group: dict[str, Any]) -> None:
        super()._check_param(param, group)
        if param.ndim not in (2, 3):
            raise ValueError(
                f"{type(self).__name__} only supports 2D parameters, and 3D parameters as stacks of them, whereas we "
                f"found a parameter with size: {param.size()}; give it to another optimizer, such as AdamW8bit"
            )
        if sharding.is_dtensor(param) and any(not placement.is_replicate() for placement in param.placements):
            raise ValueError(
                f"{type(self).__name__}: a parameter must be whole on each rank, because a matrix is orthogonalized as "
                f"a whole, got a DTensor with placements {list(param.placements)}"
            )

    def _hyper(self, group: dict[str, Any]) -> dict[str, float | bool]:
        return {**super()._hyper(group), "weight_decay": 0.0}  # that of the step with the orthogonalized direction

    def _take(self, steps: list[Step], groups: list[dict[str, Any]]) -> None:
        if not is_traced():
            check(steps)
        for step, group in zip(steps, groups, strict=True):
            for index in range(len(step.lists.params)):
                _take_one(replace(step, lists=step.lists.only(index)), group, index)


def _take_one(step: Step, group: dict[str, Any], index: int) -> None:
    """Take the step of one parameter, number ``index`` of its call: one matrix or a stack of them."""
    lists, (param,) = step.lists, step.lists.params
    direction = torch.zeros_like(param, dtype=torch.float32)  # zeros: if found_inf is set, nothing is written to it
    momentum = replace(lists, params=[direction], corrections=None)
    take([replace(step, lists=momentum, seed=None)])
    dtype = group["ns_dtype"] or fastest_dtype(param.device)
    options = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], dtype
    for matrix in direction.unbind() if direction.ndim == 3 else [direction]:
        if matrix.numel():
            matrix.copy_(orthogonalize(matrix, *options))
    ratio = _ratio(group["adjust_lr_fn"], *param.shape[-2:])
    hyper = {"decoupled": True, "weight_decay": group["weight_decay"] / ratio}  # times lr ratio
    moved = StepLists([param], [direction], [], [], [lists.steps[0] - 1], lists.corrections)
    seed = None if step.seed is None else (step.seed + (index << 48)) & LARGEST_SEED
    take([Step("sgd", "float32", step.block_size, moved, step.lr * ratio, hyper, None, step.found_inf, seed)])


def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns, 1))
    return math.sqrt(max(1.0, rows / max(columns, 1)))


class Muon(_Muon):
    """Muon with momentum in float32: 4 bytes per parameter.

    Example:
        >>> matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        >>> optimizer = lowbit.optim.Muon(matrices, lr=0.02)
    """

    STATE_FORMAT = "float32"


class Muon8bit(_Muon):
    """Muon with 8-bit momentum like that of `SGD8bit`: 1.02 bytes per parameter."""

    STATE_FORMAT = "dynamic8"
