# SPDX-License-Identifier: Apache-2.0
"""a @ b.T in int8: rows of a are rounded to codes from -127 to 127, and rows of b to codes from -128 to 127, with one
scale per row; the W8A8 kernel rows of `linear` multiply them. b is packed as the weight of `linear`, which takes no
longer than a copy, whether b or b.T is contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.ops.registration import function_of, register

register()

SPEC = LinearSpec("int8", x_format="int8_row", mapping="symmetric_no_clipping_err")
_linear_op = function_of("linear")
_pack_op = function_of("int8_pack")


def _int8_product(a: Tensor, b: Tensor) -> Tensor:
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[0])
    with torch.autocast("cpu", enabled=False):
        return _linear_op(a.contiguous(), _pack_op(b), *SPEC.op_args(*b.shape))


int8_product = torch.library.custom_op(
    "lowbit::int8_product", _int8_product, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
"""Return ``a @ b.T`` ``[m, n]``, in the dtype of a, for a ``[m, k]`` and b ``[n, k]`` on the CPU.

Both are float32, bfloat16 or float16, with any strides. If a row of a or b contains inf or nan, its row or column of
the result is nan. This is a single torch op, opaque to torch.compile, and has no gradient.
"""


@int8_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])
