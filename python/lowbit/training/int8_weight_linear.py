# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weight is trained as int8 codes. Its state dict consists of plain tensors:

weight        int8 [n, k]
weight_scale  float32 [n]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.quant.layout import text_of
from lowbit.training.int8_linear import checked_input
from lowbit.training.int8_weight import Int8Weight

SCALE = "weight_scale"


class Int8WeightLinear(nn.Linear):
    """An nn.Linear whose weight parameter is an `Int8Weight`."""

    end = 'Int8WeightOnlyQuantizedTrainingConfig(step="convert")'
    trained_as = "an int8 weight"
    float_class: type[nn.Linear]

    def __init__(self, *_: Any, **__: Any) -> None:
        config = "Int8WeightOnlyQuantizedTrainingConfig()"
        raise TypeError(f"{type(self).__name__}: quantize_(model, {config}) makes one of a float layer")

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(checked_input(self, x), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8 weight"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.codes
        destination[prefix + SCALE] = self.weight.scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        metadata, strict, missing, unexpected, errors = rest
        given = {key: state_dict.get(prefix + key) for key in ("weight", SCALE)}
        there = [key for key, value in given.items() if value is not None]
        missing += [prefix + key for key in given if key not in there]
        wanted = {"weight": self.weight.codes, SCALE: self.weight.scale}
        problems = [
            f"{prefix}{key} must be {text_of(wanted[key])} of an int8 weight, got {text_of(given[key])}"
            for key in there
            if (given[key].dtype, given[key].shape) != (wanted[key].dtype, wanted[key].shape)
        ]
        errors += problems
        if len(there) == len(given) and not problems:
            with torch.no_grad():
                self.weight.copy_(Int8Weight(given["weight"], given[SCALE], self.weight.dtype))
        others = {key: value for key, value in state_dict.items() if key not in (prefix + "weight", prefix + SCALE)}
        names: list[str] = []
        super()._load_from_state_dict(others, prefix, metadata, strict, names, unexpected, errors)
        missing += [name for name in names if name != prefix + "weight"]


class _Linear(torch.autograd.Function):
    """Autograd Function of x @ weight.T + bias. The decoded weight only exists during a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return functional.linear(x, weight.dequantize().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight.dequantize().to(grad.dtype) if for_x else None,
            (rows.T @ x.reshape(-1, x.shape[-1])).to(ctx.weight_dtype) if for_weight else None,
            rows.sum(0).to(ctx.bias_dtype) if for_bias else None,
        )
