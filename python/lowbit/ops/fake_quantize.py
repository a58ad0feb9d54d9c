# SPDX-License-Identifier: Apache-2.0
"""Weights and activations as they are after quantizing, in float, with a straight-through gradient.

A weight has the scales, codes and roundings of `quantize`, and so the values of `dequantize`, bit for bit. Its gradient
is that of the result where no code was clipped, and 0 elsewhere; a scale that is given gets the one of LSQ (Esser et
al., arXiv 1902.08153). Activations are rounded as the kernels of `linear` do. Their scales are those of their own
ranges, so none is clipped, and the gradient passes as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.ops.registration import function_of, register

register()
_weight_op = function_of("fake_quantize")
_gradient_op = function_of("fake_quantize_backward_")
_activations_op = function_of("fake_quantize_activations")
_compiler = torch.compiler  # an exported program gets its gradients from the dispatcher (derivatives.py)

WeightFormat = tuple[int, int, int]
"""(format, group_size, mapping), the numbers of `_C.FORMATS` and `_C.MAPPINGS`."""


def fake_quantize_weight(
    weight: Tensor, format: WeightFormat, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Return ``dequantize(quantize(weight))``, nothing of it packed.

    Args:
        weight: ``[n, k]`` float32, bfloat16 or float16. A group that holds inf or nan becomes nan.
        format: ``(format, group_size, mapping)``, as `LinearSpec.fake_quantize_args` says them.
        scale: ``[n, groups]`` float32, rounded as for storage; None: that of the range of each group.
        zero: likewise, the zero points that go with the scales of an asymmetric weight.

    Returns:
        Shape and dtype of weight, computed in float32 and rounded once.

    Raises:
        ValueError: a shape or number is another; says which.
        TypeError: another dtype.
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
    """Return ``linear(x, fake_quantize_weight(weight, format, scale, zero), bias)``, in less memory.

    Args:
        x: ``[..., k]``, of the dtype of weight, or of autocast's.
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
    """Return the codes uint8 ``[n, k]`` behind `fake_quantize_weight`, and scales and zero points ``[n, groups]``."""
    return _weight_op(weight.detach(), *format, scale, zero, True)


def fake_quantize_activations(x: Tensor, x_format: int, group_size: int) -> Tensor:
    """Return ``x`` as a kernel of `linear` multiplies it.

    Args:
        x: ``[..., k]`` float32, bfloat16 or float16.
        x_format: a number of ``_C.X_FORMATS``, not float.
        group_size: the group size of ``int8_group``; 0 is one scale per row.

    Raises:
        ValueError: a number is another.
        TypeError: another dtype.
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
    """`lowbit::fake_quantize` with its gradient (derivatives.py), which codes do not have."""
    if codes:
        return _weight_op(weight.detach(), format, group_size, mapping, _detached(scale), _detached(zero), True)
    return _WeightAndScales.apply(weight, scale, zero, format, group_size, mapping)


def differentiated_fake_quantize_activations(x: Tensor, x_format: int, group_size: int) -> Tensor:
    """`lowbit::fake_quantize_activations` with its gradient (derivatives.py)."""
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
        grad_weight = grad.clone(memory_format=torch.contiguous_format)  # others may hold grad
        grad_scale = _masked(ctx, grad_weight, *ctx.saved_tensors, ctx.needs_input_grad[1])
        return grad_weight, grad_scale, None, None, None, None


class _WeightAndScales(_Weight):
    """The same with the scales and zero points that were used, as the op returns them."""

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
    """x @ fake_quantize(weight).T + bias. In one with the product, the gradient of the rounded weight has no
    other owner and becomes that of the weight in place: new memory of that size costs more than the
    computation in it."""

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
            grad_weight = (rows.T @ x.reshape(-1, x.shape[-1])).to(weight.dtype).contiguous()
            grad_scale = _masked(ctx, grad_weight, weight, scale, zero, for_scale)
        return (
            grad @ rounded if for_x else None,
            grad_weight if for_weight else None,
            rows.sum(0).to(ctx.bias_dtype) if for_bias else None,
            grad_scale,
            *(None,) * 4,
        )


def _masked(ctx: Any, grad: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, scale_wanted: bool) -> Tensor | None:
    """Make the gradient of the rounded weight that of the weight, in place; return that of the scale."""
    grad_scale = _gradient_op(grad, weight, scale, zero, *ctx.format[:2], scale_wanted)
    return grad_scale if scale_wanted else None


class _Activations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_format: int, group_size: int) -> Tensor:
        return _activations_op(x, x_format, group_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None
