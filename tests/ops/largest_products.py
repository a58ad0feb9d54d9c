# SPDX-License-Identifier: Apache-2.0
"""linear at the ends of both factors: weights of one code against activations of +-127."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

import lowbit
from lowbit.testing import LinearCase, pack_codes


def largest_products(kernel: str, case: LinearCase, code: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the row gives and what is right, float64 ``[m, n]``, for activations of 127 and of -127."""
    m, n, k, group_size = case.m, case.n, case.k, case.group_size
    packed = weight_of_one_code(n, k, case.format, group_size, code)
    weight = code - (128 if case.format == "int8" else 8)
    for x in (127.0, -127.0):
        with lowbit.force_kernel(kernel):
            y = torch.ops.lowbit.linear(torch.full((m, k), x), packed, *case.op_args)
        yield y.double(), torch.full((m, n), x * weight * k, dtype=torch.float64)


@functools.lru_cache(maxsize=32)
def weight_of_one_code(n: int, k: int, format: str, group_size: int, code: int) -> Tensor:
    groups = -(-k // group_size) if group_size else 1
    return pack_codes(torch.full((n, k), code, dtype=torch.uint8), torch.ones(n, groups), None, format, group_size)
