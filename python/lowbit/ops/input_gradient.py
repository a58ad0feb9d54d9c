# SPDX-License-Identifier: Apache-2.0
"""The gradient of `linear` with respect to its input: grad_out @ w, where the packed weight is decoded.

If the gradient is bfloat16 and the CPU has fast bfloat16 products, the weight is decoded to bfloat16, and sums are
float32. Otherwise, on a CPU, the product is in float32: slices of the weight, of some panels of 16 rows each, are
decoded one after another, and their products are added up, so the whole weight is never decoded at once. On other
devices the whole weight is decoded to the dtype of the gradient, because a GPU multiplies 16-bit floats much faster
than float32.

Times for an nf4 weight of 5632 x 2048 and 512 rows, on one thread of a Xeon with AMX: in bfloat16 17 ms, of which 3.7
ms are for decoding (a bfloat16 weight takes 13 ms); in float32 96 ms with slices, 114 ms if the whole weight is decoded
first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops.decoded_rows import PANEL, WeightArgs, decoded_rows
from lowbit.ops.registration import function_of, register
from lowbit.ops.tracing import is_traced

register()
_dequantize_op = function_of("dequantize")
_SLICE = 2**20  # weights in a slice: 4 MB in float32, which stay in the cache between decoding and the product

BFLOAT16_PRODUCTS = _C.isa()["chosen"] in ("amx", "avx512_bf16")  # on other CPUs, torch's are slower than float32


def input_gradient(grad_out: Tensor, weight: Tensor, weight_args: WeightArgs, total: Tensor | None = None) -> Tensor:
    """Return ``grad_out`` ``[..., n]`` times the weight, ``[..., k]``, in the dtype of ``grad_out`` or in float32.

    ``total`` is an earlier result for another weight, to which this one is added in place.
    """
    n, k, *rest = weight_args
    in_bfloat16 = grad_out.dtype is torch.bfloat16 and weight.is_cpu and BFLOAT16_PRODUCTS
    if in_bfloat16 or not weight.is_cpu:
        return _added(total, grad_out, _dequantize_op(weight, n, k, *rest, grad_out))
    grad_out = grad_out.float()
    panels = max(1, _SLICE // (PANEL * k))
    if is_traced() or panels >= weight.shape[0]:
        return _added(total, grad_out, _dequantize_op(weight, n, k, *rest))
    rows = grad_out.reshape(-1, n)
    for start in range(0, n, PANEL * panels):
        stop = min(start + PANEL * panels, n)
        total = _added(total, rows[:, start:stop], decoded_rows(weight, weight_args, start, stop))
    assert total is not None
    return total.view(*grad_out.shape[:-1], k)


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    if total is None:
        return a @ b
    total.view(-1, b.shape[1]).addmm_(a.reshape(-1, a.shape[-1]), b)
    return total
