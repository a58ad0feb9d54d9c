# SPDX-License-Identifier: Apache-2.0
"""A second moment that is small beside its block's largest: no step is far longer than torch's, and the loss is torch's."""

from __future__ import annotations

import pytest
import torch
from small_training import train

from lowbit import optim

MAKE = {
    "AdamW8bit": lambda params, lr: optim.AdamW8bit(params, lr=lr),
    "AdamWFp8": lambda params, lr: optim.AdamWFp8(params, lr=lr),
    "AdamW4bit": lambda params, lr: optim.AdamW4bit(params, lr=lr),
    "AdamW bfloat16": lambda params, lr: optim.AdamW(params, lr=lr, state_dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def torchs() -> tuple[float, float]:
    return train(lambda params, lr: torch.optim.AdamW(params, lr=lr))


@pytest.mark.parametrize("name", MAKE)
def test_no_update_is_longer_than_ten_learning_rates_and_the_loss_is_torchs(name: str, torchs: tuple[float, float]) -> None:
    """Where a second moment rounds to 0 beside a first moment that does not, the next update is 1e5 learning rates."""
    largest, loss = train(MAKE[name])
    print(f"{name}: {largest:.2f} lr, loss {loss:.4f}; torch: {torchs[0]:.2f} lr, loss {torchs[1]:.4f}")
    assert largest <= 10 and torchs[0] <= 10
    assert loss == pytest.approx(torchs[1], rel=0.02)
