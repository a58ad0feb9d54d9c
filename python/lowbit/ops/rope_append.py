# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of the queries and keys of new tokens, which joins a cache; without a derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("rope_append_")


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """Rotate the queries and the keys of new tokens; write keys and values into a cache; return the queries.

    The two halves of the first R elements of a head are rotated against each other, as in
    transformers' ``apply_rotary_pos_emb``; the others stay. With ``q_weight`` or ``k_weight``, heads
    are normalized before (`rms_norm`).

    Args:
        qkv: heads of queries, keys and values behind one another, ``[B, L, Hq + 2 Hkv, E]`` float32, bfloat16 or
            float16, any strides.
        cos, sin: ``[B or 1, L, R]``, any of the three dtypes; R is even and at most E.
        keys, values: ``[B, Hkv, S, E]``, dtype of qkv, dense in the last dimension; tokens ``start`` to ``start + L``
            are written.
        start: the place of the first new token in the cache.
        q_weight, k_weight: ``[E]``, any of the three dtypes, or None: heads are not normalized.
        eps, offset: the parameters of the norms, as in `rms_norm`.

    Returns:
        Rotated queries ``[B, Hq, L, E]``, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: a shape does not fit, or the cache has no room for the tokens; nothing is written.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is wanted, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("rope_append", (qkv, cos, sin, keys, values, q_weight, k_weight))
    return _call(qkv, cos, sin, keys, values, start, q_weight, k_weight, eps, offset)


def fake(qkv: Tensor, keys: Tensor, **_: Any) -> Tensor:
    batch, length, heads, e = qkv.shape
    return qkv.new_empty((batch, heads - 2 * keys.shape[1], length, e))
