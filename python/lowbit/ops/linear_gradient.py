# SPDX-License-Identifier: Apache-2.0
"""grad_x = grad_y @ w of a packed weight, with the same bits for any number of threads.

torch's own product cuts its sums as the number of threads suggests to MKL. So a product on the CPU is one of our op: a
part of the columns of w becomes a float32 weight of as many rows. For 256 rows and a w of 4096 x 4096, one thread of a
Zen 3 that had other work too took 128 ms, where torch took 105.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lowbit import _C
from lowbit.ops.registration import register

register()
_linear_op = torch.ops.lowbit.linear.default
_dequantize_op = torch.ops.lowbit.dequantize.default
_is_transformed = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor

_COLUMNS = 1024
"""Columns of w at a time: bounds the copy."""


def gradient_of_x(grad_y: Tensor, weight: Tensor, weight_args: tuple[int, int, int, int, bool]) -> Tensor:
    """Return ``grad_y [..., n] @ w [n, k]`` in float32. Where it is traced, or differentiated again, the
    product is torch's.

    Args:
        weight: the packed w.
        weight_args: ``(n, k, format, group_size, asymmetric)``.
    """
    grad_y, dense = grad_y.float(), _dequantize_op(weight, *weight_args)
    if torch.is_grad_enabled() or not _is_on_cpu(grad_y):
        return grad_y @ dense
    rows = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
    forced = _C.force_kernel(None)  # a row for the format of w
    try:
        parts = [_product(rows, columns) for columns in dense.split(_COLUMNS, 1)]
    finally:
        _C.force_kernel(forced)
    return torch.cat(parts, 1).view(*grad_y.shape[:-1], dense.shape[1])


def _is_on_cpu(tensor: Tensor) -> bool:
    """Whether these are numbers in the CPU's memory: nothing is traced, and no vmap (torch has two) is around it."""
    if torch.compiler.is_dynamo_compiling() or type(tensor) is not Tensor:
        return False
    return tensor.is_cpu and not _is_transformed() and not _is_batched(tensor)


def _product(rows: Tensor, w: Tensor) -> Tensor:
    """rows [m, n] @ w [n, k], w as a float32 weight of k rows."""
    n, k = w.shape
    panels, padded_n = -(-k // 16), -(-n // 64) * 64
    if (n, k) != (padded_n, 16 * panels):  # else pad would copy
        w = functional.pad(w, (0, 16 * panels - k, 0, padded_n - n))
    packed = w.reshape(padded_n, panels, 16).transpose(0, 1).contiguous().view(torch.uint8).view(panels, -1)
    return _linear_op(rows, packed, k, n, _C.FORMATS["float32"], 0, False, 0)
