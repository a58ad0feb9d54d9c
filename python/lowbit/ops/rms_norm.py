# SPDX-License-Identifier: Apache-2.0
"""y = x * rsqrt(mean(x^2) + eps) * (offset + weight) + add, over the last dimension, and its gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.derivatives import is_recorded
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register

register()
_call = function_of("rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, add: Tensor | None = None) -> Tensor:
    """Divide each row of x by its root mean square and multiply it by ``offset + weight``. x, weight and add get
    gradients.

    Args:
        x: ``[..., n]`` float32, bfloat16 or float16, any strides.
        weight: ``[n]``, any of the three dtypes.
        eps: value added to the mean of the squares.
        offset: value added to the weight; 1 for Gemma, whose weights are centered at 0.
        add: tensor added to the result, with the shape and dtype of x.

    Returns:
        Shape and dtype of x, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the shape of weight is not ``[n]``, that of add not that of x, or eps is negative or not finite.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device; or a forward-mode derivative or vmap is requested.
    """
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("rms_norm", (x, weight, add))
    if is_recorded((x, weight, add)):
        return _RmsNorm.apply(x, weight, eps, offset, add)
    return _call(x, weight, eps, offset, add)


def differentiated_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, add: Tensor | None) -> Tensor:
    """Compute `lowbit::rms_norm` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("rms_norm", (x, weight, add))
    return _RmsNorm.apply(x, weight, eps, offset, add)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, offset: float, add: Tensor | None) -> Tensor:
        return _call(x, weight, eps, offset, add)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps, ctx.offset, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _, _, needs_add = ctx.needs_input_grad
        wide, grad = x.float(), grad_y.float()
        scale = reciprocal_root_mean_square(wide, ctx.eps)
        of_x = of_weight = None
        if needs_x:
            of_x = rms_norm_gradient(wide, scale, grad, weight.float() + ctx.offset).to(x.dtype)
        if needs_weight:
            of_weight = (grad * wide * scale).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return of_x, of_weight, None, None, grad_y if needs_add else None

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise NotImplementedError("rms_norm: vmap is not supported; all dimensions of x but the last are batches")


def reciprocal_root_mean_square(x: Tensor, eps: float) -> Tensor:
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()


def rms_norm_gradient(x: Tensor, scale: Tensor, grad_y: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient by x of ``x * scale * factor``, where ``scale`` is the `reciprocal_root_mean_square` of x."""
    grad = grad_y * factor
    mean = (grad * x).mean(-1, keepdim=True)
    return (grad - x * (mean * scale.square())) * scale


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
