# SPDX-License-Identifier: Apache-2.0
"""The routing of tokens to experts, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def choices_of(
    logits: Tensor,
    scoring: str = "softmax",
    correction: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 1,
    zero_outside: bool = False,
) -> Tensor:
    """Return the scores by which experts are chosen, float64 [T, E]."""
    choices = logits.double() if scoring.endswith("_of_chosen") else scored(logits.double(), scoring)
    if correction is not None:
        choices = choices + correction.double()
    of_groups = choices.unflatten(-1, (groups, -1))
    of_best = of_groups.topk(group_top, -1).values.sum(-1)
    kept = of_best.argsort(dim=-1, descending=True, stable=True)[..., :groups_kept]
    outside = torch.ones(of_groups.shape[:-1], dtype=torch.bool).scatter(-1, kept, False)
    return of_groups.masked_fill(outside[..., None], 0.0 if zero_outside else -torch.inf).flatten(-2)


def weights_of(
    logits: Tensor,
    index: Tensor,
    scoring: str = "softmax",
    normalize: bool = False,
    eps: float = 0.0,
    least: float = 0.0,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
) -> Tensor:
    """Return the weights of the experts ``index`` [T, k], float64."""
    if scoring.endswith("_of_chosen"):
        weights = scored(logits.double().gather(-1, index), scoring.removesuffix("_of_chosen"))
    else:
        weights = scored(logits.double(), scoring).gather(-1, index)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps).clamp(min=least)
    return weights * scale * (1.0 if expert_scale is None else expert_scale.double()[index])


def scored(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if scoring == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
