# SPDX-License-Identifier: Apache-2.0
"""Packed layers in training, with LoRA of peft or without: which of them one autograd Function computes.

A LoRA layer alone is ops/lora_linear.py in place of a product of the base and eight calls around it; fused modules
compute several layers at once. Whatever these do not compute runs peft's code, or that of the module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lowbit.ops.lora_linear import LoraLayer, lora_linear
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
        layer = None if args or kwargs else trained_layer(self, x)
        return function(self, x, *args, **kwargs) if layer is None else lora_linear(x, layer)[0]

    return forward


def trained_layer(layer: Any, x: Tensor) -> LoraLayer | None:
    """Return a layer with adapters as the Function takes it, or None if this call is one for peft's code."""
    found = trained_layers((layer,), x)
    return found[0] if found and found[0].adapters else None


def trained_layers(layers: Sequence[Any], x: Tensor, *behind: Any) -> list[LoraLayer] | None:
    """Return layers that read x, and those that read what is made of their results, as the Functions take them; None if
    autograd does not record this call, or it is not one for these."""
    if not torch.is_grad_enabled() or not is_eager(x) or _has_any_global_hook():
        return None
    if not all(map(is_step, (*layers, *behind))):
        return None
    found = [each for layer in (*layers, *behind) if (each := _plain(layer, x.dtype)) is not None]
    if len(found) < len(layers) + len(behind) or any(
        x.shape[-1:] != (each.op_args[1],) for each in found[: len(layers)]
    ):
        return None
    factors = (factor for each in found for down, up, _ in each.adapters for factor in (down, up))
    return found if x.requires_grad or any(factor.requires_grad for factor in factors) else None


def _plain(layer: Any, dtype: torch.dtype) -> LoraLayer | None:
    """Return a layer for which `is_step` holds, unless its bias is trained or its factors are other than parameters of
    this dtype."""
    base, adapters = base_of(layer), factors_of(layer)
    if base.bias is not None and base.bias.requires_grad:
        return None
    if any(
        type(factor) is not torch.nn.Parameter or factor.dtype is not dtype
        for down, up, _ in adapters
        for factor in (down, up)
    ):
        return None
    return LoraLayer(base.W_q, base.bias, base.op_args, base.row_number, adapters)
