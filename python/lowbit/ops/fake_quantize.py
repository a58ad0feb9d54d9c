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

from lowbit.ops.registration import register

register()
_weight_op = torch.ops.lowbit.fake_quantize.default
_gradient_op = torch.ops.lowbit.fake_quantize_backward.default
_activations_op = torch.ops.lowbit.fake_quantize_activations.default

WeightFormat = tuple[int, int, int]
"""(format, group_size, mapping), the numbers of `_C.FORMATS` and `_C.MAPPINGS`."""


def fake_quantize_weight(
    weight: Tensor, format: WeightFormat, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Return ``dequantize(quantize(weight))``, nothing of it packed.

    Args:
        weight: ``[n, k]`` float32, bfloat16 or float16. A group that holds inf or nan becomes nan.
        format: ``(format, group_size, mapping)``, as `LinearSpec.fake_quantize_args` says them.
        scale: ``[n, groups]`` float32, rounded to what is stored; None: that of the range of each group.
        zero: likewise, the zero points that go with the scales of an asymmetric weight.

    Returns:
        Shape and dtype of weight, computed in float32 and rounded once.

    Raises:
        ValueError: a shape or number is another; says which.
        TypeError: another dtype.
    """
    return _Weight.apply(weight, scale, zero, *format)


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
        group_size: of ``int8_group``; 0 is one scale per row.

    Raises:
        ValueError: a number is another.
        TypeError: another dtype.
    """
    return _Activations.apply(x, x_format, group_size)


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor | None, zero: Tensor | None, format: int, group_size: int, mapping: int
    ) -> Tensor:
        out, used_scale, used_zero = _weight_op(weight, format, group_size, mapping, scale, zero)
        ctx.save_for_backward(weight, used_scale, used_zero)
        ctx.format = format, group_size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, zero = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        grad_weight, grad_scale = _gradient_op(grad, weight, scale, zero, *ctx.format, wanted)
        return grad_weight, grad_scale if wanted else None, None, None, None, None


class _Activations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_format: int, group_size: int) -> Tensor:
        return _activations_op(x, x_format, group_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None
