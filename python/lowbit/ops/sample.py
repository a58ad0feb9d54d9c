# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token from logits, as in transformers' generate. It has no derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.ops.derivatives import is_differentiated, refuse_derivatives
from lowbit.ops.registration import function_of, register

register()
_call = function_of("sample")


def sample(
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    position: int = 0,
) -> Tensor:
    """Sample a token for each row of logits, in float32, with transformers' logits processors in their order.

    A result depends only on the arguments and the index of the row, not on the number of threads. To generate text,
    pass the same seed in every call, and the number of tokens so far as the position.

    Args:
        logits: ``[B, V]`` float32, bfloat16 or float16, any strides.
        ids: int32 or int64 ``[B, L]``, the tokens so far, for ``repetition_penalty``; -1 is no token.
        temperature: divisor of the logits. 0 is greedy: the token with the max logit, the first one if several have it.
        top_k: number of largest logits to keep; logits equal to the k-th are kept too. 0 keeps all.
        top_p: probability mass to keep: in descending order, a token is kept while those before it have a total
            probability below ``top_p``; at least one token is kept. Of equal tokens the last comes first.
        min_p: min probability to keep, as a fraction of the max probability.
        repetition_penalty: before all else, positive logits of ``ids`` are divided by it, and negative ones multiplied.
        seed: any int64.
        position: any int64.

    Returns:
        int64 ``[B]``.

    Raises:
        ValueError: a shape does not fit; a number is out of range; ``ids`` contains a number that is not a token; or a
            row of logits contains nan or inf, or only -inf.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is requested, or no kernel row serves the device.

    Example:
        >>> token = lowbit.sample(logits, temperature=0.8, top_k=40, seed=1, position=ids.shape[1])
    """
    if is_differentiated():
        refuse_derivatives("sample", (logits, ids))
    return _call(logits, ids, temperature, top_k, top_p, min_p, repetition_penalty, seed, position)


def fake(logits: Tensor, **_: Any) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)
