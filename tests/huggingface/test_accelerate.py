# SPDX-License-Identifier: Apache-2.0
"""QLoRA under accelerate: prepare, accumulate, clip, and a run resumed by load_state that is the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
from qlora import adapted, data, packed, same, trained  # noqa: E402

from lowbit import optim  # noqa: E402

STEPS, ACCUMULATED, MAX_NORM = 6, 2, 0.05
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW8bit": lambda params: optim.AdamW8bit(params, lr=1e-2, min_8bit_size=1),
    "AdamW4bit": lambda params: optim.AdamW4bit(params, lr=1e-2, min_8bit_size=1),
    "Lion8bit": lambda params: optim.Lion8bit(params, lr=1e-3, min_8bit_size=1),
    "CPUOffloadOptimizer": lambda params: optim.CPUOffloadOptimizer(params, optim.AdamW8bit, lr=1e-2, min_8bit_size=1),
}


class Run:
    """A model, an optimizer, a schedule and texts in a random order, prepared by accelerate."""

    def __init__(self, maker: str, seed: int = 0) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        model = adapted(seed=seed).train()
        optimizer = MAKERS[maker](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    def train(self, first: int, last: int) -> list[float]:
        """Take steps ``first`` to ``last``; return the norms of their gradients."""
        norms = []
        batches = iter(accelerate.skip_first_batches(self.loader, ACCUMULATED * first))
        for _ in range(ACCUMULATED * (last - first)):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**next(batches)).loss)
                if self.accelerator.sync_gradients:
                    norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return norms

    def end(self) -> dict[str, Any]:
        states = dict(enumerate(self.optimizer.state_dict()["state"].values()))
        return {
            "adapters": trained(self.model),
            "states": states,
            "rng": torch.get_rng_state(),
            "lr": self.scheduler.get_last_lr(),
        }


@pytest.mark.parametrize("maker", MAKERS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(maker: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = Run(maker)
    base = packed(whole.model)
    norms = whole.train(0, 3)
    whole.accelerator.save_state(str(tmp_path))
    whole.train(0, 3)
    assert len(norms) == 3 and min(norms) > MAX_NORM  # gradients were clipped, once for two batches
    assert [float(state["step"]) for state in whole.end()["states"].values()] == [6.0] * len(trained(whole.model))

    torch.manual_seed(77)
    resumed = Run(maker, seed=5)  # other adapters, which the checkpoint replaces
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(0, 3)
    assert same(whole.end(), resumed.end()) and same(base, packed(resumed.model))


def test_accumulated_and_clipped_steps_are_those_of_a_plain_loop() -> None:
    torch.manual_seed(3)
    run = Run("AdamW8bit")
    run.train(0, 2)
    torch.manual_seed(3)
    model = adapted().train()
    optimizer = MAKERS["AdamW8bit"](model.parameters())
    batches = iter(torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True))
    for lr in (1e-2, 1e-2 * (1 + torch.cos(torch.tensor(torch.pi / STEPS)).item()) / 2):
        for _ in range(ACCUMULATED):
            (model(**next(batches)).loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    for name, wanted in trained(model).items():
        torch.testing.assert_close(trained(run.model)[name], wanted, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    run, other = Run("AdamW8bit"), Run("Lion8bit")
    run.train(0, 1)
    run.accelerator.save_state(str(tmp_path))
    with pytest.raises(ValueError, match="Lion8bit.load_state_dict: param group 0: Invalid rule value: 'adamw'"):
        other.accelerator.load_state(str(tmp_path))
    assert all(float(state["step"]) == 0 for state in other.optimizer.state.values())
