# SPDX-License-Identifier: Apache-2.0
"""linear at the ends of both factors: weights of one code against activations of +-127."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.testing import LinearCase


def largest_products(kernel: str, case: LinearCase, code: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the row gives and what is right, float64 ``[m, n]``, for activations of 127 and of -127."""
    m, n, k, group_size = case.m, case.n, case.k, case.group_size
    groups, format = -(-k // group_size) if group_size else 1, _C.FORMATS[case.format]
    packed = torch.zeros(-(-n // 16), _C.panel_bytes(format, k, group_size, False), dtype=torch.uint8)
    _C.pack(
        torch.full((n, k), code, dtype=torch.uint8),
        torch.ones(n, groups),
        None,
        packed,
        n,
        k,
        format,
        group_size,
        False,
    )
    weight = code - (128 if case.format == "int8" else 8)
    for x in (127.0, -127.0):
        with lowbit.force_kernel(kernel):
            y = torch.ops.lowbit.linear(torch.full((m, k), x), packed, *case.op_args)
        yield y.double(), torch.full((m, n), x * weight * k, dtype=torch.float64)
