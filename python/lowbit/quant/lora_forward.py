# SPDX-License-Identifier: Apache-2.0
"""The forward of peft's LoRA over packed layers while it trains: one autograd Function (ops/lora_linear.py) in place of
a product of the base and eight calls around it. Whatever it does not compute runs peft's code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lowbit.ops.lora_linear import LowRankFactors, lora_linear
from lowbit.quant.fused import is_eager
from lowbit.quant.lora_layers import base_of, factors_of, is_step


def forward_of(cls: type) -> Callable[..., Any]:
    """Return the forward for a subclass of a layer class of peft: its own, but for that of linear layers with LoRA."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    function: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]
    if peft is None or cls is not peft.Linear:
        return function

    @functools.wraps(function)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapters = [] if args or kwargs else _adapters_to_train(self, x)
        if not adapters:
            return function(self, x, *args, **kwargs)
        base = base_of(self)
        return lora_linear(x, base.W_q, base.bias, base.op_args, base.row_number, adapters)

    return forward


def _adapters_to_train(layer: Any, x: Tensor) -> list[LowRankFactors]:
    """Return the adapters that a call adds to the base, or none if it is one for peft's code."""
    if not torch.is_grad_enabled() or not is_eager(x) or not is_step(layer) or _has_any_global_hook():
        return []
    base = base_of(layer)
    if x.shape[-1:] != (base.in_features,):
        return []
    adapters = factors_of(layer)
    factors = [factor for down, up, _ in adapters for factor in (down, up)]
    trains_bias = base.bias is not None and base.bias.requires_grad
    recorded = x.requires_grad or any(factor.requires_grad for factor in factors)
    plain = all(type(factor) is torch.nn.Parameter and factor.dtype is x.dtype for factor in factors)
    return adapters if recorded and plain and not trains_bias else []
