# SPDX-License-Identifier: Apache-2.0
"""y = (x - mean(x)) * rsqrt(var(x) + eps) * (offset + weight) + bias + add, over the last dimension. It has no
derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("layer_norm")


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """Subtract its mean from each row of x, divide by the standard deviation, and apply weight and bias.

    Args:
        x: ``[..., n]`` float32, bfloat16 or float16, any strides.
        weight, bias: ``[n]``, any of the three dtypes; None is the factor 1, and nothing added.
        eps: value added to the variance.
        offset: value added to the weight; 1 for Nemotron, whose weights are centered at 0.
        add: tensor added to the result, with the shape and dtype of x.

    Returns:
        Shape and dtype of x, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the shape of weight or bias is not ``[n]``, that of add not that of x, or eps is negative or not
            finite.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is requested, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("layer_norm", (x, weight, bias, add))
    return _call(x, weight, bias, eps, offset, add)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
