# SPDX-License-Identifier: Apache-2.0
"""A linear layer that is trained with int8 products. Each of the three products can be in int8, with scales:

    output        y           = x @ weight.T + bias    per row of x and per row of weight
    grad_input    grad_x      = grad_y @ weight        per row of grad_y and per column of weight
    grad_weight   grad_weight = grad_y.T @ x           per column of grad_y and per column of x

Parameters, names and state dict are those of the float layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.quant.kinds import weights_of
from lowbit.training.int8_product import int8_product

PRODUCTS = ("output", "grad_input", "grad_weight")


class Int8MixedPrecisionLinear(nn.Linear):
    """A trainable nn.Linear, or Conv1D of transformers, that multiplies in int8."""

    end = "Int8MixedPrecisionTrainingConfig(False, False, False)"
    trained_as = "int8 products"
    multiplies_weight = True
    """Code that multiplies by ``weight`` directly gets the layer's result, except for rounding in the products."""
    int8_products: tuple[bool, bool, bool]
    """For each of `PRODUCTS`, whether it is in int8."""
    float_class: type[nn.Module]
    transposed: bool
    """Whether the weight is stored as [k, n], as in a Conv1D."""

    def __init__(self, *_: Any, **__: Any) -> None:
        config = "Int8MixedPrecisionTrainingConfig()"
        raise TypeError(f"{type(self).__name__}: quantize_(model, {config}) makes one of a float layer")

    def forward(self, x: Tensor) -> Tensor:
        x = checked_input(self, x)
        weight = self.weight.T if self.transposed else self.weight
        y = _Linear.apply(x.reshape(-1, self.in_features), weight, self.bias, *self.int8_products)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        in_int8 = [name for name, wanted in zip(PRODUCTS, self.int8_products, strict=True) if wanted]
        return f"{super().extra_repr()}, int8 {', '.join(in_int8)}"


def checked_input(layer: nn.Linear, x: Tensor) -> Tensor:
    """Check the input of a layer, and cast it to the dtype of autocast if that is enabled.

    Raises:
        TypeError: without autocast, the dtype of x is not that of the weight.
        ValueError: the last dimension of x is not in_features.
    """
    device, name = x.device.type, type(layer).__name__
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype is not layer.weight.dtype:
        raise TypeError(f"{name}: x must be {layer.weight.dtype}, as weight is, got {x.dtype}")
    if not x.dim() or x.shape[-1] != layer.in_features:
        raise ValueError(f"{name}: x must be [..., {layer.in_features}], got {list(x.shape)}")
    return x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *int8_products: bool) -> Tensor:
        for_x, for_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.int8_products, ctx.weight_dtype = int8_products, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(x, weight, int8_products, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = gradients(grad, x, weight, ctx.int8_products, ctx.weight_dtype)
        grad_bias = grad.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def product(x: Tensor, weight: Tensor, int8_products: tuple[bool, ...], bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of x, multiplied in int8 if the first of `PRODUCTS` is."""
    if not int8_products[0]:
        return functional.linear(x, weight, bias)
    y = int8_product(x, weight)
    return y if bias is None else y.add_(bias)


def gradients(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, int8_products: tuple[bool, ...], weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, if there is a weight, and of the weight, if there is an x."""
    _, int8_input, int8_weight = int8_products
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = int8_product(grad, weight.T) if int8_input else grad @ weight.to(grad.dtype)
    if x is not None and int8_weight:  # each operand is rounded from its own dtype; the result has that of the weight
        grad_weight = int8_product(grad.T.to(weight_dtype), x.T)
    elif x is not None:
        grad_weight = (grad.T @ x).to(weight_dtype)
    return grad_x, grad_weight


def prepare_in_place(module: nn.Module, int8_products: tuple[bool, bool, bool]) -> None:
    """Turn a float layer into an `Int8MixedPrecisionLinear` in place; its parameters and hooks stay the same."""
    (weight,) = weights_of(module)
    module.float_class, module.transposed = type(module), weight.transposed
    module.out_features, module.in_features = weight.n, weight.k
    module.__class__, module.int8_products = Int8MixedPrecisionLinear, int8_products


def restore_in_place(module: Int8MixedPrecisionLinear) -> None:
    """Turn the layer back into its former float class, in place."""
    module.__class__ = module.float_class
    for name in ("float_class", "transposed", "int8_products"):
        del module.__dict__[name]
