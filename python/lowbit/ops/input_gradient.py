# SPDX-License-Identifier: Apache-2.0
"""The gradient of `linear` to its input: grad_out @ w, of a packed weight, decoded.

Gradients in bfloat16 are multiplied in bfloat16, with sums in float32, where the CPU has such products: by the weight
as the op decodes it to bfloat16. Else the product is in float32, and each slice of it, some panels of 16 columns, adds
to the result, so that no decoded weight is in memory. On other devices the whole weight is decoded to the dtype of the
gradient: a GPU multiplies 16 bits some ten times as fast as float32.

A weight of 5632 x 2048 in nf4 on one thread of a Xeon with AMX: 3.7 ms to decode to bfloat16, 17 ms with the product of
512 rows (13 ms of a bfloat16 weight); 96 ms in float32 slices, 114 with the whole weight decoded to float32 first.
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
_SLICE = 2**20  # weights: 4 MB of float32, which stay in the cache until they are read again

BFLOAT16_PRODUCTS = _C.isa()["chosen"] in ("amx", "avx512_bf16")  # torch's are slower than float32 elsewhere


def input_gradient(grad_out: Tensor, weight: Tensor, weight_args: WeightArgs) -> Tensor:
    """Return ``grad_out`` [..., n] times the weight, [..., k], in the dtype of ``grad_out`` or in float32."""
    n, k, *rest = weight_args
    in_bfloat16 = grad_out.dtype is torch.bfloat16 and weight.is_cpu and BFLOAT16_PRODUCTS
    if in_bfloat16 or not weight.is_cpu:
        return grad_out @ _dequantize_op(weight, n, k, *rest, grad_out)
    grad_out = grad_out.float()
    panels = max(1, _SLICE // (PANEL * k))
    if is_traced() or panels >= weight.shape[0]:
        return grad_out @ _dequantize_op(weight, n, k, *rest)
    rows, total = grad_out.reshape(-1, n), None
    for start in range(0, n, PANEL * panels):
        stop = min(start + PANEL * panels, n)
        columns = decoded_rows(weight, weight_args, start, stop)
        part = rows[:, start:stop]
        total = part @ columns if total is None else total.addmm_(part, columns)
    return total.view(*grad_out.shape[:-1], k)
