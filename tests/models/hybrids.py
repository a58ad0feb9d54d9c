# SPDX-License-Identifier: Apache-2.0
"""What tests of models with recurrent layers share: a padded prompt, and how close logits must be."""

from __future__ import annotations

import torch
from decoders import prompt
from torch import Tensor

BUDGET = 2e-4  # of the largest logit: a few layers of float32 sums in another order


def close(got: Tensor, wanted: Tensor, budget: float = BUDGET) -> None:
    assert (got - wanted).abs().max() <= budget * wanted.abs().max()


def padded() -> tuple[Tensor, Tensor]:
    ids, seen = prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    seen[0, :4], seen[2, :1] = 0, 0
    return ids, seen
