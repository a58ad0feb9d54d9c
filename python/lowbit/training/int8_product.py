# SPDX-License-Identifier: Apache-2.0
"""a @ b.T in int8: the rows of both are rounded to codes of -127 to 127 (-128 to 127 where they are packed) times one
scale a row, and multiplied by the W8A8 rows of `linear`.

Of the two, the one with fewer rows is packed as the weight of `linear`: a row is packed in ten times the time that
the kernel takes to round one of its x. If that is a, the result is transposed after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.quant.packing import all_finite, pack_weight

SPEC = LinearSpec("int8", x_format="int8_row", mapping="symmetric_no_clipping_err")
_linear_op = torch.ops.lowbit.linear.default


def _int8_product(a: Tensor, b: Tensor) -> Tensor:
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[0])
    dtype = torch.promote_types(a.dtype, b.dtype)
    if a.shape[0] < b.shape[0]:
        return _product_of_packed(b.to(dtype), a).T.to(a.dtype).contiguous()
    return _product_of_packed(a.to(dtype), b).to(a.dtype)


def _product_of_packed(x: Tensor, weight: Tensor) -> Tensor:
    weight, not_finite = weight.contiguous(), None
    if not all_finite(weight):  # the kernel makes rows of x with such a number nan; columns are ours to make
        not_finite = ~weight.isfinite().all(1)
        weight = weight.masked_fill(not_finite.unsqueeze(1), 0)
    packed, _ = pack_weight(weight, SPEC)
    with torch.autocast("cpu", enabled=False):
        y = _linear_op(x.contiguous(), packed, *SPEC.op_args(*weight.shape))
    if not_finite is not None:
        y[:, not_finite] = torch.nan
    return y


int8_product = torch.library.custom_op(
    "lowbit::int8_product", _int8_product, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
"""Return ``a @ b.T``, [m, n] in the dtype of a, of a [m, k] and b [n, k] on the CPU: float32, bfloat16 or float16, in
any strides. A row that holds inf or nan makes its row or column of the result nan. One op of torch, opaque to
torch.compile; it has no gradient."""


@int8_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])
