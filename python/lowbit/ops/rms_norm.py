# SPDX-License-Identifier: Apache-2.0
"""y = x * rsqrt(mean(x^2) + eps) * (offset + weight) + add, over the last dimension. It has no derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, add: Tensor | None = None) -> Tensor:
    """Divide each row of x by its root mean square and multiply it by ``offset + weight``.

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
        NotImplementedError: a derivative is requested, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("rms_norm", (x, weight, add))
    return _call(x, weight, eps, offset, add)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
