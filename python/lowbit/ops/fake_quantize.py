# SPDX-License-Identifier: Apache-2.0
"""Fake quantization: float weights and activations with the values they have after quantizing, and a straight-through
gradient.

For weights, scales, codes and rounding are those of `quantize`, so the values are those of `dequantize`, bit for bit.
The gradient of a weight is that of the result where the code was not clipped, and 0 elsewhere. A scale that is given
gets the gradient of LSQ (Esser et al., arXiv 1902.08153). Activations are rounded as in the kernels of `linear`. Their
scales follow from their own range, so nothing is clipped, and the gradient passes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.ops.registration import function_of, register

register()
_weight_op = function_of("fake_quantize")
_gradient_op = function_of("fake_quantize_backward_")
_activations_op = function_of("fake_quantize_activations")
_compiler = torch.compiler  # exported programs get gradients from the dispatcher (derivatives.py)

WeightFormat = tuple[int, int, int]
"""(format, group_size, mapping), with the numbers of `_C.FORMATS` and `_C.MAPPINGS`."""


def fake_quantize_weight(
    weight: Tensor, format: WeightFormat, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Return ``dequantize(quantize(weight))`` without packing.

    Args:
        weight: ``[n, k]`` float32, bfloat16 or float16. A group that contains inf or nan becomes nan.
        format: ``(format, group_size, mapping)``, see `LinearSpec.fake_quantize_args`.
        scale: ``[n, groups]`` float32, rounded as for storage; None computes scales from the range of each group.
        zero: ``[n, groups]`` float32, the zero points for ``scale`` if the weight is asymmetric.

    Returns:
        Shape and dtype of weight, computed in float32 and rounded once.

    Raises:
        ValueError: a shape or a number does not fit; the message names it.
        TypeError: a dtype is not one of the above.
    """
    if _compiler._is_exporting_flag:
        return _weight_op(weight, *format, scale, zero)[0]
    return _Weight.apply(weight, scale, zero, *format)


def fake_quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: WeightFormat,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """Return ``linear(x, fake_quantize_weight(weight, format, scale, zero), bias)``, using less memory.

    Args:
        x: ``[..., k]``, with the dtype of weight or of autocast.
        weight, format, scale, zero: the arguments of `fake_quantize_weight`.
        bias: ``[n]`` or None.
    """
    if _compiler._is_exporting_flag:
        rounded = fake_quantize_weight(weight, format, scale, zero)
        return functional.linear(x, rounded.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else rounded, bias)
    return _Linear.apply(x, weight, bias, scale, zero, *format)


def quantize_weight(
    weight: Tensor, format: WeightFormat, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes uint8 ``[n, k]`` that `fake_quantize_weight` decodes, with scales and zero points
    ``[n, groups]``."""
    return _weight_op(weight.detach(), *format, scale, zero, True)


def fake_quantize_activations(x: Tensor, x_format: int, group_size: int) -> Tensor:
    """Return ``x`` rounded as in the kernels of `linear`.

    Args:
        x: ``[..., k]`` float32, bfloat16 or float16.
        x_format: a number in ``_C.X_FORMATS`` other than that of "float".
        group_size: the group size of ``int8_group``; 0 is one scale per row.

    Raises:
        ValueError: a number is not one of the above.
        TypeError: the dtype is not one of the above.
    """
    if _compiler._is_exporting_flag:
        return _activations_op(x, x_format, group_size)
    return _Activations.apply(x, x_format, group_size)


def differentiated_fake_quantize(
    weight: Tensor,
    format: int,
    group_size: int,
    mapping: int,
    scale: Tensor | None,
    zero: Tensor | None,
    codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lowbit::fake_quantize` with its gradient, for derivatives.py. Codes have no gradient."""
    if codes:
        return _weight_op(weight.detach(), format, group_size, mapping, _detached(scale), _detached(zero), True)
    return _WeightAndScales.apply(weight, scale, zero, format, group_size, mapping)


def differentiated_fake_quantize_activations(x: Tensor, x_format: int, group_size: int) -> Tensor:
    """Compute `lowbit::fake_quantize_activations` with its gradient, for derivatives.py."""
    return _Activations.apply(x, x_format, group_size)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor | None, zero: Tensor | None, *format: int) -> Tensor:
        out, used_scale, used_zero = _weight_op(weight, *format, scale, zero)
        ctx.save_for_backward(weight, used_scale, used_zero)
        ctx.format = format
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight = grad.clone(memory_format=torch.contiguous_format)  # a copy, as autograd may use grad elsewhere
        grad_scale = _masked(ctx.format, grad_weight, *ctx.saved_tensors, ctx.needs_input_grad[1])
        return grad_weight, grad_scale, None, None, None, None


class _WeightAndScales(_Weight):
    """`_Weight` that also returns the scales and zero points that were used, as the op does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        out = _Weight.forward(ctx, *inputs)
        _, scale, zero = ctx.to_save
        ctx.mark_non_differentiable(scale, zero)
        return out, scale, zero

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return _Weight.backward(ctx, grad)


class _Linear(torch.autograd.Function):
    """Autograd Function of x @ fake_quantize(weight).T + bias.

    Rounding and product are one Function, so that the gradient of the rounded weight can be turned into that of the
    weight in place: allocating another tensor of this size would cost more than the computation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        zero: Tensor | None,
        *format: int,
    ) -> Tensor:
        rounded, used_scale, used_zero = _weight_op(weight, *format, scale, zero)
        if torch.is_autocast_enabled(x.device.type):
            rounded = rounded.to(x.dtype)
        for_x, for_weight, _, for_scale, *_ = ctx.needs_input_grad
        trained = for_weight or for_scale
        ctx.save_for_backward(x if trained else None, rounded if for_x else None, weight, used_scale, used_zero)
        ctx.format, ctx.bias_dtype = format, None if bias is None else bias.dtype
        return functional.linear(x, rounded, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded, weight, scale, zero = ctx.saved_tensors
        for_x, for_weight, for_bias, for_scale = ctx.needs_input_grad[:4]
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = grad_scale = None
        if for_weight or for_scale:
            inputs = x.reshape(-1, x.shape[-1])
            grad_weight, grad_scale = weight_gradients(rows, inputs, weight, scale, zero, ctx.format, for_scale)
        return (
            grad @ rounded if for_x else None,
            grad_weight if for_weight else None,
            rows.sum(0).to(ctx.bias_dtype) if for_bias else None,
            grad_scale,
            *(None,) * 4,
        )


def rounded_weight(weight: Tensor, format: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of the rounded weight, without a gradient, and the scales and zero points that were used."""
    return _weight_op(weight, *format, None, None)


def weight_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, format: Sequence[int], scale_wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the weight and, if it is wanted, of the scale, for grad ``[rows, n]`` and x ``[rows, k]``
    of a product with the rounded weight."""
    grad_weight = (grad.T @ x).to(weight.dtype).contiguous()
    return grad_weight, _masked(format, grad_weight, weight, scale, zero, scale_wanted)


def _masked(
    format: Sequence[int], grad: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, scale_wanted: bool
) -> Tensor | None:
    """Turn the gradient of the rounded weight into that of the weight, in place; return the gradient of the scale."""
    grad_scale = _gradient_op(grad, weight, scale, zero, *format[:2], scale_wanted)
    return grad_scale if scale_wanted else None


class _Activations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_format: int, group_size: int) -> Tensor:
        return _activations_op(x, x_format, group_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None
