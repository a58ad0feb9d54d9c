# SPDX-License-Identifier: Apache-2.0
"""Attention from torch's own ops, with the full matrix of scores, for derivatives that the kernels do not have.

`gradients` can be differentiated again, and `forward` supports forward mode. Neither supports score programs or block
masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.ops.registration import check


def forward(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, max score) of a call, as `lowbit.ops.attention.attention` does."""
    check("attention_forward", call)
    scores = _scores(call)
    p, empty = _probabilities(scores)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)
    length = call["k"].shape[2]
    largest = scores.detach()[..., :length].amax(-1) if length else torch.full_like(lse.detach(), -torch.inf)
    if call["dropout_p"] > 0:
        p = torch.dropout(p, call["dropout_p"], train=True)
    return (p[..., :length] @ _wide(call, call["v"])).to(call["q"].dtype), lse, largest


def gradients(
    call: dict[str, Any], needs: dict[str, Any], grad_out: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor | None]:
    """Return the gradients of a call without dropout, by the name of the tensor. Those of mask and sink are None unless
    needed."""
    q, k, v, mask, length = call["q"], call["k"], call["v"], call["mask"], call["k"].shape[2]
    groups = _groups(call)
    p, _ = _probabilities(_scores(call))
    p, p_sink = p[..., :length], p[..., length:]
    grad_out = grad_out.to(p.dtype)
    grad_p = grad_out @ _wide(call, v).transpose(-1, -2)
    d = (p * grad_p).sum(-1, keepdim=True)
    if grad_lse is not None:
        d = d - grad_lse.to(p.dtype)[..., None]
    grad_s = p * (grad_p - d)
    return {
        "q": (grad_s @ _wide(call, k) * call["scale"]).to(q.dtype),
        "k": (grad_s.transpose(-1, -2) @ q.to(p.dtype) * call["scale"]).unflatten(1, groups).sum(2).to(k.dtype),
        "v": (p.transpose(-1, -2) @ grad_out).unflatten(1, groups).sum(2).to(v.dtype),
        "mask": grad_s.sum_to_size(mask.shape).to(mask.dtype) if needs["mask"] else None,
        "sink": -(p_sink * d).sum((0, 2, 3)) if needs["sink"] else None,
        "seed": None,
    }


def _scores(call: dict[str, Any]) -> Tensor:
    """Return the masked scores, with the sink as an additional column."""
    q, mask, sink = call["q"], call["mask"], call["sink"]
    keys = _wide(call, call["k"])
    scores = q.to(keys.dtype) @ keys.transpose(-1, -2) * call["scale"]
    visible = None
    if call["causal"]:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else mask & visible
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores if sink is None else torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of each row, and which rows are fully masked. Such rows are 0 instead of nan."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0), empty


def _wide(call: dict[str, Any], tensor: Tensor) -> Tensor:
    """Return k or v in float32 or float64, with its heads repeated to match q."""
    real = torch.float64 if call["q"].dtype == torch.float64 else torch.float32
    return tensor.to(real).repeat_interleave(_groups(call)[1], 1)


def _groups(call: dict[str, Any]) -> tuple[int, int]:
    """Return the number of heads of k, and the number of heads of q that share one."""
    heads = call["k"].shape[1]
    return heads, call["q"].shape[1] // max(1, heads)
