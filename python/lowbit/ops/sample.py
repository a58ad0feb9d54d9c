# SPDX-License-Identifier: Apache-2.0
"""The next token of each row of logits, drawn as transformers' generate does; without a derivative."""

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
    """Choose a token for each row, with the logits processors of transformers in their order, in float32.

    A draw depends on ``seed``, ``position`` and the number of the row alone, whatever the number of threads: a
    generation passes one seed, and the number of tokens so far as the position.

    Args:
        logits: ``[B, V]`` float32, bfloat16 or float16, any strides.
        ids: int32 or int64 ``[B, L]``, the tokens so far, which ``repetition_penalty`` is for; -1 is no token.
        temperature: divides the logits. 0 is greedy: the first of the largest logits, and no draw.
        top_k: the number of largest logits to keep, and those equal to the k-th; 0 keeps all.
        top_p: the mass to keep of these: in descending order, a token stays while those before it hold less than
            ``top_p``; at least one stays. Of equal ones the last comes first.
        min_p: the min probability to keep of these, as a fraction of the largest one.
        repetition_penalty: positive logits of ``ids`` are divided by it and negative ones multiplied, first of all.
        seed: any int64.
        position: any int64.

    Returns:
        int64 ``[B]``.

    Raises:
        ValueError: a shape does not fit, a number is out of its range, ``ids`` has a number that is no token, or a row
            of logits has nan, inf or nothing but -inf.
        TypeError: a dtype is not one of the above.
        NotImplementedError: a derivative is wanted, or no kernel row serves the device.
    """
    if is_differentiated():
        refuse_derivatives("sample", (logits, ids))
    return _call(logits, ids, temperature, top_k, top_p, min_p, repetition_penalty, seed, position)


def fake(logits: Tensor, **_: Any) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)
