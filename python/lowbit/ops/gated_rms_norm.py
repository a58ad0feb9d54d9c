# SPDX-License-Identifier: Apache-2.0
"""An RMSNorm over groups of channels, with a gate s(gate):

y = x * rsqrt(mean(x^2) + eps) * weight * s(gate), or the same of x * s(gate) without the last factor
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("gated_rms_norm")


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
    ``sigmoid(gate)``. Mamba-2, Granite 4 and Nemotron-H multiply first and norm groups of the result.

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
        NotImplementedError: a derivative is requested, or no kernel row serves the device.

    Example:
        >>> y = lowbit.gated_rms_norm(o, z, norm.weight, norm.variance_epsilon)
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm: activation must be 'silu' or 'sigmoid', got {activation!r}")
    if is_differentiated():
        refuse_derivatives("gated_rms_norm", (x, gate, weight))
    size = x.shape[-1] if group_size is None else group_size
    return _call(x, gate, weight, eps, size, activation == "sigmoid", gate_first)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
