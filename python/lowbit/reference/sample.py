# SPDX-License-Identifier: Apache-2.0
"""The probabilities of the next token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(
    logits: Tensor,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Return the probabilities, float64 ``[B, V]``. Of equal values, the last counts as the largest."""
    x = logits.double()
    if ids is not None:
        chosen = x.gather(1, ids)
        x = x.scatter(1, ids, torch.where(chosen < 0, chosen * repetition_penalty, chosen / repetition_penalty))
    x = x / temperature
    if top_k:
        x = x.masked_fill(x < x.topk(min(top_k, x.shape[1])).values[:, -1:], -torch.inf)
    if top_p < 1:
        values, order = x.sort(stable=True)
        p = values.softmax(-1)
        removed = p.flip(1).cumsum(1).flip(1) - p >= top_p  # the probability above it
        removed[:, -1] = False
        x = x.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    p = x.softmax(-1)
    return x.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf).softmax(-1)
