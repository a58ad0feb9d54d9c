# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices with torchao's scales and codes; on a CPU, codes are multiplied exactly by float
products.

    scale = float32(max of the dtype / max(amax, 1e-12)), or the power of two below it;  code = float8(x * scale)
    a @ b = sum(code_a * code_b) / (scale_a * scale_b)

On a CPU a scale is split into power * ratio, where power is a power of two and ratio is in [0.5, 1] (1 if scales are
powers of two). A code has 3 or 4 significant bits, so code / power is exact in bfloat16 and float32. These values are
multiplied, and the product is divided by both ratios. Products of two codes are exact in float32, in which they are
summed. The range is sufficient: whatever overflows or underflows here does so in a sum of float8 products too.

On CUDA, codes are multiplied by torch._scaled_mm, and its float32 sums are divided by the scales.

On a CPU the op float8_cast computes scales and values in one call. torch's own functions are slow: on one thread of a
Xeon with AMX, a cast of a 2048 x 2048 weight from float8 takes 18 ms, and torch._scaled_mm takes 7 s for 128 rows and a
1024 x 1024 weight.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.ops.input_gradient import BFLOAT16_PRODUCTS
from lowbit.ops.registration import function_of, register
from lowbit.training.float8_config import CastConfig, ScalingGranularity

register()
_cast_op = function_of("float8_cast")
_SMALLEST_AMAX = 1e-12  # as in torchao; keeps the scale of zeros finite
_MULTIPLE = 16  # cuBLASLt requires matrix sizes that are multiples of it for float8


@dataclass(frozen=True, slots=True)
class Operand:
    """The values of a matrix that are multiplied, and the divisor of the product, which is broadcast, or None."""

    values: Tensor
    divisor: Tensor | None = None

    @property
    def T(self) -> Operand:
        return Operand(self.values.T, None if self.divisor is None else self.divisor.T)


def float8_scale(x: Tensor, cast: CastConfig, dim: int, power_of_2: bool) -> Tensor:
    """Return the scale of ``x`` ``[rows, columns]``, float32.

    Its shape is ``[1, 1]`` for TENSORWISE; for AXISWISE it is ``[rows, 1]`` (dim 1) or ``[1, columns]`` (dim 0). The
    scale is nan where x is not finite, so that the product becomes nan.
    """
    axiswise = cast.scaling_granularity is ScalingGranularity.AXISWISE
    if not x.numel():  # an empty tensor has no max
        amax = x.new_zeros([1 if i == dim or not axiswise else size for i, size in enumerate(x.shape)])
    elif axiswise:
        amax = x.abs().amax(dim, keepdim=True)
    else:  # aminmax allocates no tensor for abs, but is slow along a dimension
        low, high = x.aminmax()
        amax = torch.maximum(high, -low).view(1, 1)
    amax = amax.double()
    amax = torch.where(amax.isfinite(), amax, torch.nan).clamp(min=_SMALLEST_AMAX)
    scale = (torch.finfo(cast.target_dtype).max / amax).float()
    return scale / torch.frexp(scale).mantissa / 2 if power_of_2 else scale


def operand(x: Tensor, cast: CastConfig, dim: int, power_of_2: bool, dtype: torch.dtype, emulate: bool) -> Operand:
    """Return ``x`` as the operand of a product.

    Args:
        x: ``[rows, columns]``.
        cast: how x is cast.
        dim: the dimension that the product sums over.
        power_of_2: whether scales are rounded down to powers of two.
        dtype: the dtype of the product's result.
        emulate: whether CUDA multiplies the float8 values in float.
    """
    if not cast.is_cast:
        return Operand(x.to(dtype))
    product = product_dtype(x, dtype)
    if x.is_cpu and x.numel():
        scale_of = dim if cast.scaling_granularity is ScalingGranularity.AXISWISE else -1
        e5m2 = cast.target_dtype is torch.float8_e5m2
        values, divisor = _cast_op(x, e5m2, scale_of, power_of_2, product is torch.bfloat16)
        return Operand(values, None if power_of_2 else divisor)
    scale = float8_scale(x, cast, dim, power_of_2)
    codes = (x * scale).to(cast.target_dtype)
    if x.is_cuda and not emulate:
        return Operand(codes, scale)
    ratio = None if power_of_2 else torch.frexp(scale).mantissa
    power = scale if ratio is None else scale / ratio
    return Operand((codes.float() / power).to(product), ratio)


def product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which float8 values are multiplied for a result of ``dtype``. The range of float16 is too
    small."""
    return torch.bfloat16 if dtype is torch.bfloat16 and (BFLOAT16_PRODUCTS or not x.is_cpu) else torch.float32


def multiply(a: Operand, b: Operand, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Return the product of ``a`` ``[m, k]`` and ``b`` ``[k, n]`` in ``dtype``."""
    if a.values.dtype.itemsize == 1:
        out = scaled_mm(a.values, b.values, fast_accum)
    else:
        device = a.values.device.type
        autocast_off = nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
        with autocast_off:  # autocast would round the operands
            out = a.values @ b.values
    divisors = [divisor for divisor in (a.divisor, b.divisor) if divisor is not None]
    if len(divisors) == 2 and all(divisor.numel() == 1 for divisor in divisors):
        divisors = [divisors[0] * divisors[1]]
    for divisor in divisors:  # torch divides bfloat16 by a 0-dim tensor without copies
        out.div_(divisor.view(()) if divisor.numel() == 1 else divisor)
    return out.to(dtype)


def scaled_mm(a: Tensor, b: Tensor, fast_accum: bool) -> Tensor:
    """Return the product of codes ``a`` ``[m, k]`` and ``b`` ``[k, n]`` by cuBLASLt, float32. Sizes are padded with
    zeros."""
    m, n = a.shape[0], b.shape[1]
    a, b = _padded(a), _padded(b.T).T  # b must be column-major
    one = torch.ones((), device=a.device)
    out = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast_accum)
    return out[:m, :n]


def _padded(x: Tensor) -> Tensor:
    rows, columns = (-size % _MULTIPLE for size in x.shape)
    if rows or columns:
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)
    return x.contiguous()
