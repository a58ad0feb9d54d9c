# SPDX-License-Identifier: Apache-2.0
"""The optimizers of lowbit, each with its torch twin and what its state format may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit import optim


def lion_twin(params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Lion in plain torch: there is none in torch.optim."""
    return _Lion(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class _Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (beta1 * average + (1 - beta1) * p.grad).sign())
                average.mul_(beta2).add_((1 - beta2) * p.grad)


@dataclass(frozen=True)
class Case:
    """make(params, **options) is ours, twin(params, **options) torch's; drift: rms over 20 steps, relative to the way gone
    (float8: one rounding of its 3 bits of mantissa)."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    twin: Callable[..., torch.optim.Optimizer]
    drift: float

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("AdamW", optim.AdamW, torch.optim.AdamW, 1e-5),
    Case("AdamW-bf16", lambda params, **options: optim.AdamW(params, state_dtype=torch.bfloat16, **options), torch.optim.AdamW, 1e-2),
    Case("AdamW8bit", optim.AdamW8bit, torch.optim.AdamW, 0.02),
    Case("AdamW4bit", optim.AdamW4bit, torch.optim.AdamW, 0.3),
    Case("AdamWFp8", optim.AdamWFp8, torch.optim.AdamW, 2**-4),
    Case("Adam8bit", optim.Adam8bit, torch.optim.Adam, 0.02),
    Case("Adam4bit", optim.Adam4bit, torch.optim.Adam, 0.3),
    Case("AdamFp8", optim.AdamFp8, torch.optim.Adam, 2**-4),
    Case("SGD8bit", optim.SGD8bit,
         lambda params, **options: torch.optim.SGD(params, **{"momentum": 0.9} | options), 0.03),
    Case("Lion8bit", optim.Lion8bit, lion_twin, 0.15),
]  # fmt: skip


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Three parameters: with whole blocks, with a last partial one, and one that is too small for codes."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((64, 128), (83, 71), (19,))]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def set_grads(*lists: list[nn.Parameter], seed: int = 0) -> None:
    """The same gradients for each list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, generator=generator)
        for p in together:
            p.grad = grad.to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, seed: int = 0) -> None:
    for i in range(steps):
        set_grads(params, seed=seed + i)
        optimizer.step()


def trained(make: Callable[..., torch.optim.Optimizer], steps: int = 2) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters and an optimizer that has made so many steps."""
    params = parameters()
    optimizer = make(params, lr=0.01)
    run(optimizer, params, steps)
    return params, optimizer


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """State of every parameter, in order."""
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
