# SPDX-License-Identifier: Apache-2.0
"""y = scale * f(x) + add, element by element, where f is x, relu(x)^2 or xIELU. It has no derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("pointwise")
IDENTITY, RELU_SQUARED, XIELU = range(3)


def pointwise(
    x: Tensor,
    function: int = IDENTITY,
    *,
    scale: float = 1.0,
    add: Tensor | None = None,
    positive: float = 0.0,
    negative: float = 0.0,
    linear: float = 0.0,
) -> Tensor:
    """Compute ``scale * f(x) + add``.

    Args:
        x: float32, bfloat16 or float16, any strides.
        function: 0 for x, 1 for ``relu(x)^2``, 2 for xIELU, ``positive * max(x, 0)^2 + negative * (e^min(x, 0) - 1 -
            min(x, 0)) + linear * x``.
        add: shape and dtype of x.

    Returns:
        Shape and dtype of x, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: function is none of these, a number is not finite, or the shape of add is not that of x.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is requested, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("pointwise", (x, add))
    return _call(x, function, scale, add, positive, negative, linear)


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
