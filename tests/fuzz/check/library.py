# SPDX-License-Identifier: Apache-2.0
"""Masks and mods of the library, by their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lowbit

from .attention import flex_now
from .compare import within
from .reference import over_scores


def mask(mask_mod: Any, length: int, wanted: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    """The pairs that the mask keeps, as it is, in a block mask, and in flex_attention."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = wanted(i, j).expand(length, length)
    within(over_scores(mask_mod, None, (1, 1, length, length))[0, 0].double(), seen.double(), 0.0, f"masks.{name}")
    q, k, v = (torch.randn(1, 1, length, 8) for _ in range(3))
    flex_now(q, k, v, mask_mod=mask_mod, what=f"masks.{name}")


def block_diffusion(length: int, size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The training mask of BD3-LM: noised tokens, then clean ones."""

    def seen(i: Tensor, j: Tensor) -> Tensor:
        q_clean, k_clean, q_block, k_block = i >= length, j >= length, i % length // size, j % length // size
        return (
            (~q_clean & ~k_clean & (q_block == k_block))
            | (~q_clean & k_clean & (q_block > k_block))
            | (q_clean & k_clean & (q_block >= k_block))
        )

    return seen


def alibi(heads: int, length: int) -> None:
    """Slopes of the paper: powers of two for 2**n heads, and for other counts those of the next lower 2**n, then every second of twice as many."""

    def slopes(count: int) -> list[float]:
        lower = 2 ** int(math.log2(count))
        first = [2.0 ** (-8 * (at + 1) / lower) for at in range(lower)]
        return first if lower == count else first + slopes(2 * lower)[0::2][: count - lower]

    wanted = torch.tensor(slopes(heads), dtype=torch.float64)
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    scores = torch.randn(1, heads, length, length, dtype=torch.float64)
    exact = scores + wanted[None, :, None, None] * distance
    mod = lowbit.attention.mods.alibi(heads)
    within(over_scores(mod, scores, (1, heads, length, length)), exact, 1e-5 * (1 + exact.abs()), "mods.alibi")
    q, k, v = (torch.randn(1, heads, length, 8) for _ in range(3))
    flex_now(q, k, v, score_mod=mod, what="mods.alibi")


def softcap(cap: float, length: int) -> None:
    """cap tanh(score / cap)."""
    scores = torch.randn(1, 2, length, length, dtype=torch.float64) * 10
    mod = lowbit.attention.mods.softcap(cap)
    within(over_scores(mod, scores, tuple(scores.shape)), cap * torch.tanh(scores / cap), 1e-9, "mods.softcap")
    q, k, v = (torch.randn(1, 2, length, 8) * 3 for _ in range(3))
    flex_now(q, k, v, score_mod=mod, what="mods.softcap")
