# SPDX-License-Identifier: Apache-2.0
"""Every ready-made score mod against a formula of its own, its picture, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from lowbit.attention import mods
from lowbit.score.mod import ScoreMod

L, S, H = 20, 30, 4


def test_alibi() -> None:
    distance = torch.arange(S)[None, :] - torch.arange(L)[:, None]
    for head, slope in enumerate((2**-2, 2**-4, 2**-6, 2**-8)):  # the paper's slopes for 4 heads
        torch.testing.assert_close(mods.alibi(H).dense(L, S, h=head, score=1.5), 1.5 + distance * slope)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 12, 20, 40])
def test_alibi_has_the_slopes_of_mpt(heads: int) -> None:
    """The paper's rule; MPT's code, which transformers has, arrives at the same numbers in another way."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    ours = torch.stack([mods.alibi(heads).dense(2, 1, h=head)[1, 0] for head in range(heads)])
    torch.testing.assert_close(ours, -theirs)


@pytest.mark.parametrize("score", [-80.0, -3.0, 0.0, 2.0, 500.0])
def test_softcap(score: float) -> None:
    expected = torch.full((L, S), 50 * math.tanh(score / 50))
    torch.testing.assert_close(mods.softcap(50.0).dense(L, S, score=score), expected)


@pytest.mark.parametrize("shape", [(L, S), (H, L, S), (2, H, L, S)])
def test_learned_bias(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    expected = bias.expand(2, H, L, S)[1, 2] + 0.5
    torch.testing.assert_close(mods.learned_bias(bias).dense(L, S, b=1, h=2, score=0.5), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5_bias_is_that_of_transformers(bidirectional: bool, buckets: int, max_distance: int) -> None:
    table, length = torch.randn(buckets, H), 300
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    bucket = T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    mod = mods.t5_bias(table, max_distance=max_distance, bidirectional=bidirectional)
    torch.testing.assert_close(mod.dense(length, h=3), table[bucket][..., 3])


def test_pictures() -> None:
    assert mods.alibi(1).text(2, 3).splitlines()[0][-1] == "█"
    assert repr(mods.softcap(20.0)) == "softcap(20.0)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mods.alibi(0), "alibi: heads must be at least 1, got heads=0"),
        (lambda: mods.softcap(0.0), "softcap: cap must be above 0, got cap=0.0"),
        (lambda: mods.learned_bias(torch.zeros(3)), r"learned_bias: bias must be \[L, S\], .* got \[3\]"),
        (lambda: mods.t5_bias(torch.zeros(3)), r"t5_bias: table must have shape \[buckets, H\], got \[3\]"),
        (lambda: mods.t5_bias(torch.zeros(32, 4), max_distance=8), "t5_bias: max_distance must be above 8 for 32 buckets, got max_distance=8"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], ScoreMod], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
