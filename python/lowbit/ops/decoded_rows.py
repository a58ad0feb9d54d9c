# SPDX-License-Identifier: Apache-2.0
"""Some rows of a packed weight as float."""

from __future__ import annotations

from torch import Tensor

from lowbit.ops.registration import function_of, register

register()
_dequantize_op = function_of("dequantize")
PANEL = 16
"""Rows of a weight that lie together."""

WeightArgs = tuple[int, int, int, int, bool]
"""(n, k, format, group_size, asymmetric), as the op dequantize takes them."""


def decoded_rows(weight: Tensor, weight_args: WeightArgs, start: int, stop: int, like: Tensor | None = None) -> Tensor:
    """Return rows ``[stop - start, k]`` of a packed weight in the dtype of ``like``, by default float32; 0 <= start <=
    stop <= n. The panels that hold them are decoded, and no others."""
    n, k, *rest = weight_args
    first, last = start // PANEL, -(-stop // PANEL)
    before = first * PANEL
    rows = _dequantize_op(weight[first:last], min(last * PANEL, n) - before, k, *rest, like)
    return rows[start - before : stop - before]
