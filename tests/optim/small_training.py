# SPDX-License-Identifier: Apache-2.0
"""A training in which second moments of one block are ten decades apart: a text of 64 words, and units that are often
off. `train` gives the largest update of a parameter, in units of lr, and the loss of the last 50 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from settings import ambient
from torch import Tensor, nn

WORDS, CONTEXT, LR = 64, 8, 3e-3


def text(words: int = 20_000) -> Tensor:
    """Each word is drawn by the one before it; few are frequent."""
    random = torch.Generator().manual_seed(1)
    rank = torch.arange(1, WORDS + 1)
    chances = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=random) - 1.5 * rank.log(), 1).cumsum(1)
    draws, word, drawn = torch.rand(words, generator=random), 0, []
    for draw in draws:
        word = min(int(torch.searchsorted(chances[word], draw)), WORDS - 1)
        drawn.append(word)
    return torch.tensor(drawn)


@ambient("threads 1")  # products of 32 rows: more threads beside other work take 20 times as long
def train(make: Callable[[Iterator[nn.Parameter], float], torch.optim.Optimizer]) -> tuple[float, float]:
    words = text()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, WORDS),
    )  # fmt: skip
    optimizer = make(model.parameters(), LR)
    largest, losses = 0.0, []
    for _ in range(300):
        start = torch.randint(0, len(words) - CONTEXT, (32,))
        context = words[start[:, None] + torch.arange(CONTEXT)]
        loss = nn.functional.cross_entropy(model(context), words[start + CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        moved = [(param.detach() - old).abs().max() for param, old in zip(model.parameters(), before, strict=True)]
        largest = max(largest, float(torch.stack(moved).max()) / LR)  # nan is never larger: the loss tells of it
        losses.append(loss.item())
    return largest, sum(losses[-50:]) / 50
