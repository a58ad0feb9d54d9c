# SPDX-License-Identifier: Apache-2.0
"""A fast check whether query, key and value can go to the op unchanged, as in most calls. Without it, the checks would
take most of the time of a small call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.devices.places import has_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_plain(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    """Whether all arguments are valid and nothing needs to be broadcast. It replaces checks of each argument that could
    name the error.

    Args:
        query, key, value: anything.
        enable_gqa: whether the heads of query may be a multiple of those of key.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False  # without a shape
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
    """Return the type of device whose autocast applies: that of query if it is CUDA, else the CPU's."""
    return "cuda" if isinstance(query, Tensor) and query.is_cuda else "cpu"


def softmax_scale(op: str, scale: Any, head_dim: int) -> float:
    """Return the factor of the scores: ``scale``, or 1 / sqrt(head_dim) if None.

    Raises:
        TypeError: scale is not a number.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scale must be a number, got {type(scale).__name__}") from None
