# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of new tokens, whose keys and values are appended to a cache. It has no derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("rope_append_")
HALVES, NEIGHBOURS, NEIGHBOURS_OF_HALVES, NEIGHBOURS_TO_HALVES = range(4)


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
    rotation: int = HALVES,
    grouped: bool = False,
    norm_behind: bool = False,
    gated: bool = False,
) -> Tensor:
    """Rotate the queries and keys of new tokens, write keys and values into a cache, and return the queries.

    Within the first R elements of a head, the first half is rotated with the second, as in transformers'
    ``apply_rotary_pos_emb``; the other elements do not change. With ``q_weight`` or ``k_weight``, heads are normalized
    first (`rms_norm`).

    Args:
        qkv: heads of queries, keys and values, in this order, ``[B, L, Hq + 2 Hkv, E]`` float32, bfloat16 or float16,
            any strides.
        cos, sin: ``[B or 1, L, R]``, any of the three dtypes; R is even and at most E.
        keys, values: ``[B, Hkv, S, E]``, dtype of qkv, dense in the last dimension; tokens ``start`` to ``start + L``
            are written.
        start: the position of the first new token in the cache.
        q_weight, k_weight: ``[E]``, any of the three dtypes; None does not normalize heads. Weights of all heads,
            ``[Hq E]`` and ``[Hkv E]``, normalize them as one row.
        eps, offset: the parameters of the norms, as in `rms_norm`.
        rotation: 0 rotates the first half with the second; 1 neighbouring elements; 2 neighbours too, with cos and sin
            of pair i in column i; 3 the same, with the results of pair i in columns i and R / 2 + i.
        grouped: the heads are Hkv groups, each of Hq / Hkv queries, a key and a value.
        norm_behind: heads are normalized after the rotation, not before.
        gated: behind each head of queries is its gate, so that qkv is ``[B, L, 2 Hq + 2 Hkv, E]``; the gates do not
            change.

    Returns:
        Rotated queries ``[B, Hq, L, E]``, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: a shape does not fit, or the cache is too short for the tokens; nothing is written.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is requested, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("rope_append", (qkv, cos, sin, keys, values, q_weight, k_weight))
    return _call(qkv, cos, sin, keys, values, start, q_weight, k_weight, eps, offset, rotation, grouped, norm_behind, gated)


def fake(qkv: Tensor, keys: Tensor, gated: bool, **_: Any) -> Tensor:
    batch, length, heads, e = qkv.shape
    queries = heads - 2 * keys.shape[1]
    return qkv.new_empty((batch, queries // 2 if gated else queries, length, e))
