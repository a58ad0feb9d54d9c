# SPDX-License-Identifier: Apache-2.0
"""An RMSNorm over groups of channels, with a gate s(gate):

y = x * rsqrt(mean(x^2) + eps) * weight * s(gate), or the same of x * s(gate) without the last factor
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.ops.derivatives import is_recorded, refuse_derivatives
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register

register()
_call, _backward = function_of("gated_rms_norm"), function_of("gated_rms_norm_backward")


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
) -> Tensor:
    """Divide each group of channels of x by its root mean square, and multiply it by weight and an activated gate.

    Qwen3-Next, Qwen3.5 and OLMo-hybrid norm each head and then multiply by ``silu(gate)``; Kimi-Linear does so with
    ``sigmoid(gate)``. Mamba-2, Granite 4 and Nemotron-H multiply first and norm groups of the result. x, gate and weight
    get gradients.

    Args:
        x: ``[..., n]`` float32, bfloat16 or float16. Strides are free if the last dimension is dense.
        gate: shape of x, any of the three dtypes, likewise.
        weight: ``[n]``, any of the three dtypes.
        eps: value added to the mean of the squares.
        group_size: number of consecutive channels that have a mean of their own, a divisor of n; None is n.
        activation: ``"silu"`` or ``"sigmoid"``, the function of the gate.
        gate_first: whether x is multiplied by the gate before it is normed, instead of after that.

    Returns:
        Shape and dtype of x, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the shape of gate is not that of x, that of weight not ``[n]``, group_size does not divide n, eps is
            negative or not finite, or ``activation`` is not one of the above.
        TypeError: a dtype is not one of the above.
        NotImplementedError: no kernel row serves the device; or a second or forward-mode derivative or vmap is
            requested.

    Example:
        >>> y = lowbit.gated_rms_norm(o, z, norm.weight, norm.variance_epsilon)
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm: activation must be 'silu' or 'sigmoid', got {activation!r}")
    size, sigmoid = x.shape[-1] if group_size is None else group_size, activation == "sigmoid"
    if forward_ad._current_level >= 0:  # the level is -1 outside forward mode
        refuse_tangents("gated_rms_norm", (x, gate, weight))
    if is_recorded((x, gate, weight)):
        return _GatedRmsNorm.apply(x, gate, weight, eps, size, sigmoid, gate_first)
    return _call(x, gate, weight, eps, size, sigmoid, gate_first)


def differentiated_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, sigmoid: bool, gate_first: bool
) -> Tensor:
    """Compute `lowbit::gated_rms_norm` with its gradient, for derivatives.py."""
    if forward_ad._current_level >= 0:
        refuse_tangents("gated_rms_norm", (x, gate, weight))
    return _GatedRmsNorm.apply(x, gate, weight, eps, group_size, sigmoid, gate_first)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, sigmoid: bool, gate_first: bool
    ) -> Tensor:
        return _call(x, gate, weight, eps, group_size, sigmoid, gate_first)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, gate, weight, *ctx.options = inputs
        ctx.save_for_backward(x, gate, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            refuse_derivatives("the backward of gated_rms_norm", (x, gate, weight, grad_y))
        grads = _backward(x, gate, weight, grad_y, *ctx.options)
        wanted = ctx.needs_input_grad[:3]
        return *(grad if needed else None for grad, needed in zip(grads, wanted, strict=True)), None, None, None, None

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise NotImplementedError("gated_rms_norm: vmap is not supported; all dimensions of x but the last are batches")


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
