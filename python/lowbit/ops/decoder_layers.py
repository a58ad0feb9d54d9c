# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder in one call: the calls of `linear`, `rms_norm`, `rope_append` and `attention` that they are made
of, without the way back to Python between them; without a derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("decoder_layers_")


def decoder_layers(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    start: int,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    score_mod: Sequence[int],
    norms: Sequence[Tensor],
    eps: float,
    offset: float,
    weights: Sequence[Tensor],
    linears: Sequence[int],
    activation: int,
    head_norms: Sequence[Tensor] = (),
    heads_eps: float = 0.0,
    heads_offset: float = 0.0,
) -> Tensor:
    """Compute layers of Llama's kind for new tokens, and write their keys and values into a cache.

    ``h = x + o(attention(rope_append(qkv(norm(x)))))``, then ``h + down(act(gate(norm(h))) * up(norm(h)))``, which is x
    of the next layer. With four norms (Gemma), the results of o and down are normalized too, before they are added.

    In each list stand the entries of one layer behind those of the one before.

    Args:
        x: ``[B, L, k]`` float32, bfloat16 or float16.
        cos, sin, start, heads_eps, heads_offset: as `rope_append` takes them.
        keys, values: one ``[B, Hkv, S, E]`` of each for a layer, dtype of x; tokens ``start`` to ``start + L`` are
            written, and those before them are seen.
        mask, causal, scale, score_mod: as `attention` takes them; causal only with ``start=0``.
        norms: two weights ``[k]``, or four; eps, offset: of all of them, as in `rms_norm`.
        weights: packed weights of qkv, o, gate, up and down, each followed by its bias where it has one. Where x has
            one row, qkv may be three weights.
        linears: for each layer 1 or 3, the weights of qkv, then eight numbers for each weight: its ``op_args``, the row
            that it prefers, whether it has a bias.
        activation: of gate, as in `linear`.
        head_norms: weights of the norms of queries and keys ``[E]``, or none.

    Returns:
        ``[B, L, k]``, dtype of x.

    Raises:
        ValueError: a shape does not fit, or a cache has no room for the tokens; nothing is written.
        TypeError: a dtype does not fit; nothing is written.
        NotImplementedError: a derivative is wanted, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("decoder_layers", (x, cos, sin, mask, *keys, *values, *norms, *weights, *head_norms))
    return _call(
        x, cos, sin, keys, values, start, mask, causal, scale, score_mod, norms, eps, offset, weights, linears,
        activation, head_norms, heads_eps, heads_offset,
    )  # fmt: skip


def fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)
