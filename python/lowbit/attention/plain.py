# SPDX-License-Identifier: Apache-2.0
"""Check whether query, key and value can go to the op unchanged, as in most calls: most of the Python time of a small
call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.devices.places import has_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_plain(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    """Whether all is well and nothing needs to be broadcast; 2 us, where each check by its name takes 5 and the
    views another 12.

    Args:
        query, key, value: anything.
        enable_gqa: the heads of query may be a multiple of those of key.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False  # has no shape to look at
    q, k, v = query.shape, key.shape, value.shape
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and (q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0))
        and k[1] == v[1]
        and k[2] == v[2]
        and q[3] == k[3] > 0
        and v[3] > 0
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and (query.is_cpu and key.is_cpu and value.is_cpu or _are_served(query.device, key.device, value.device))
    )


def _are_served(q: torch.device, k: torch.device, v: torch.device) -> bool:
    return q == k == v and has_rows("attention_forward", q)


def autocast_device(query: Any) -> str:
    """The type of device whose autocast a call is in: that of its query, the CPU's for all but CUDA."""
    return "cuda" if isinstance(query, Tensor) and query.is_cuda else "cpu"


def softmax_scale(op: str, scale: Any, head_dim: int) -> float:
    """The factor of the scores: ``scale``, or 1 / sqrt(head_dim) for None.

    Raises:
        TypeError: scale is not a number.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scale must be a number, got {type(scale).__name__}") from None
