# SPDX-License-Identifier: Apache-2.0
"""y = act(x @ w.T + bias) * mul + add in float64, with the weight and the activations that the kernels use."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from lowbit.reference.activations import quantize_activations
from lowbit.reference.quantize import LEVELS, QuantizedWeight, code_of_zero

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
    "silu": functional.silu,
}


def linear(
    x: Tensor,
    weight: QuantizedWeight | Tensor,
    x_format: str = "float",
    bias: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """Return the float64 result ``[m, n]``. ``weight`` is quantized, or a float ``[n, k]``."""
    y = product(x, weight, x_format)
    if bias is not None:
        y = y + bias.double()
    y = ACTIVATIONS[activation](y)
    if mul is not None:
        y = y * mul.double()
    return y if add is None else y + add.double()


def product(x: Tensor, weight: QuantizedWeight | Tensor, x_format: str = "float") -> Tensor:
    """Return x @ w.T, float64."""
    dense = weight.decode() if isinstance(weight, QuantizedWeight) else weight.double()
    return _activations(x, weight, x_format) @ dense.T


def magnitude(x: Tensor, weight: QuantizedWeight | Tensor, x_format: str = "float") -> Tensor:
    """Return sum_k |x| * |w|, to which rounding errors are proportional.

    Kernels may multiply codes relative to an offset of their own (0 for int4, else the zero point of a symmetric
    weight) and subtract zero point times sum of x from the total. So the magnitude of a weight is its distance to that
    offset plus the distance of the zero point. Without such an offset this is |w|.
    """
    if isinstance(weight, QuantizedWeight):
        offset = 0 if weight.format == "int4" or weight.format in LEVELS else code_of_zero(weight.format)
        zero = weight.spread(weight.zero_or_symmetric).double()
        steps = (weight.levels - offset).abs() + (zero - offset).abs()
        dense = weight.spread(weight.scale).double().abs() * steps  # a searched scale may be negative
    else:
        dense = weight.double().abs()
    if x_format == "float" or not isinstance(weight, QuantizedWeight):
        return x.double().abs() @ dense.T
    activations = quantize_activations(x, x_format, weight.group_size)
    return (activations.scale.double() * (activations.codes.abs() + activations.zero.abs())) @ dense.T


def _activations(x: Tensor, weight: QuantizedWeight | Tensor, x_format: str) -> Tensor:
    if x_format == "float":
        return x.double()
    if not isinstance(weight, QuantizedWeight):
        raise ValueError(f"linear: x_format must be float for a float weight, got {x_format}")
    return quantize_activations(x, x_format, weight.group_size).decode()
