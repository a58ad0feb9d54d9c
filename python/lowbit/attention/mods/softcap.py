# SPDX-License-Identifier: Apache-2.0
"""Softcap on the scores (Gemma 2, Grok)."""

from __future__ import annotations

import torch

from lowbit.score.mod import ScoreMod


def softcap(cap: float) -> ScoreMod:
    """Return the mod ``cap * tanh(score / cap)``.

    Raises:
        ValueError: cap is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"softcap: cap must be above 0, got cap={cap}")
    return ScoreMod(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), f"softcap({cap})")
