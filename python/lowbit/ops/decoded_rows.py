# SPDX-License-Identifier: Apache-2.0
"""Decoding of some rows of a packed weight."""

from __future__ import annotations

from torch import Tensor

from lowbit.ops.registration import function_of, register

register()
_dequantize_op = function_of("dequantize")
PANEL = 16
"""Rows of a weight that are stored together."""

WeightArgs = tuple[int, int, int, int, bool]
"""(n, k, format, group_size, asymmetric), the arguments of the op dequantize."""


def decoded_rows(weight: Tensor, weight_args: WeightArgs, start: int, stop: int, like: Tensor | None = None) -> Tensor:
    """Return rows ``start`` to ``stop`` of a packed weight, ``[stop - start, k]``, in the dtype of ``like`` or float32.

    Requires 0 <= start <= stop <= n. Only the panels that contain these rows are decoded.
    """
    n, k, *rest = weight_args
    first, last = start // PANEL, -(-stop // PANEL)
    before = first * PANEL
    rows = _dequantize_op(weight[first:last], min(last * PANEL, n) - before, k, *rest, like)
    return rows[start - before : stop - before]
