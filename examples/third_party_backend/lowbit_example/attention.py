# SPDX-License-Identifier: Apache-2.0
"""A row of `attention_forward` in Python: torch's own ops on the device of the tensors, all scores at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuses(*, q: Tensor, mask: Tensor | None, sink: Tensor | None, dropout_p: float, kv_num_blocks: Tensor | None,
            **others: Any) -> str | None:  # fmt: skip
    """Say why the row cannot run a call; tensors are without memory here."""
    if q.dtype == torch.float64:
        return "float64 is not there"
    if mask is not None or sink is not None or dropout_p > 0 or kv_num_blocks is not None:
        return "a mask, a sink, dropout and a block mask are not there"
    return None


def forward(*, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, max_scores: Tensor | None,
            scale: float, causal: bool, **others: Any) -> None:  # fmt: skip
    """Write softmax(scale * q k^T) v into ``out``, and the wanted ones of ``lse`` and ``max_scores``."""
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    scores = q.float() @ keys.transpose(-1, -2) * scale
    if causal:  # query i sees keys 0 to i
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    out.copy_(scores.softmax(-1) @ values)
    if lse is not None:
        lse.copy_(scores.logsumexp(-1))
    if max_scores is not None:
        max_scores.copy_(scores.amax(-1))
