# SPDX-License-Identifier: Apache-2.0
"""Float8Linear: an nn.Linear whose three products are computed in float8. Its weight stays float and is cast in every
product; no copy of it is saved for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowbit.training.float8_config import CastConfig, Float8LinearConfig, ScalingGranularity
from lowbit.training.float8_product import Operand, multiply, operand


class Float8Linear(nn.Linear):
    """An nn.Linear that multiplies in float8. Names, parameters and state dict are those of the float layer."""

    config: Float8LinearConfig
    end = "end_float8_training(model)"
    multiplies_weight = True
    """Code that multiplies by ``weight`` directly gets the layer's result, except for rounding in the products."""

    @property
    def trained_as(self) -> str:
        return f"float8 ({self.config})"

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("Float8Linear: convert_to_float8_training(model) makes one of an nn.Linear")

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # autocast does not support meta
            input = input.to(torch.get_autocast_dtype(device))
        elif input.dtype != self.weight.dtype:
            raise TypeError(f"Float8Linear: input must be {self.weight.dtype} as the weight, got {input.dtype}")
        if input.shape[-1:] != (self.in_features,):
            wanted, got = self.in_features, list(input.shape)
            raise ValueError(f"Float8Linear: input must have shape [..., {wanted}], got {got}")
        return _Float8Linear.apply(input, self.weight, self.bias, self.config)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config}"


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, config: Float8LinearConfig) -> Tensor:
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.config, ctx.bias_dtype, ctx.weight_dtype = config, bias.dtype if for_bias else None, weight.dtype
        out = product(x.reshape(-1, x.shape[-1]), weight, config)
        if bias is not None:
            out.add_(bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        x = None if x is None else x.reshape(-1, x.shape[-1])
        grad_x, grad_weight = gradients(rows, x, weight, ctx.config, ctx.weight_dtype)
        grad_x = None if grad_x is None else grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        grad_bias = rows.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return grad_x, grad_weight, grad_bias, None


def product(x: Tensor, weight: Tensor, config: Float8LinearConfig) -> Tensor:
    """Return ``x @ weight.T`` for x ``[rows, k]``, in its dtype."""
    return multiply(
        _operand(x, config.cast_config_input, 1, x.dtype, config),
        _operand(weight, config.cast_config_weight, 1, x.dtype, config).T,
        x.dtype,
        config.gemm_config_output.use_fast_accum,
    )


def gradients(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, config: Float8LinearConfig, weight_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, if there is a weight, and of the weight, if there is an x, for grad ``[rows, n]``."""
    dtype, grad_x, grad_weight, by_rows = grad.dtype, None, None, None
    if weight is not None:
        by_rows = _operand(grad, config.cast_config_grad_output, 1, dtype, config)
        other = _operand(weight, config.cast_config_weight_for_grad_input, 0, dtype, config)
        grad_x = multiply(by_rows, other, dtype, config.gemm_config_grad_input.use_fast_accum)
    if x is not None:
        cast = config.cast_config_grad_output_for_grad_weight
        if by_rows is None or cast != config.cast_config_grad_output or not _is_tensorwise(cast):
            by_rows = _operand(grad, cast, 0, dtype, config)
        other = _operand(x, config.cast_config_input_for_grad_weight, 0, dtype, config)
        fast_accum = config.gemm_config_grad_weight.use_fast_accum
        grad_weight = multiply(by_rows.T, other, dtype, fast_accum).to(weight_dtype)
    return grad_x, grad_weight


def _operand(x: Tensor, cast: CastConfig, dim: int, dtype: torch.dtype, config: Float8LinearConfig) -> Operand:
    return operand(x, cast, dim, config.round_scales_to_power_of_2, dtype, config.emulate)


def _is_tensorwise(cast: CastConfig) -> bool:
    """Return whether the operand has one scale, and is therefore the same in each product."""
    return cast.is_cast and cast.scaling_granularity is ScalingGranularity.TENSORWISE
