# SPDX-License-Identifier: Apache-2.0
"""What the tests of a device have in common: functions of torch beside the CPU, a small model, and its configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import lowbit

CONFIGS = (lowbit.int8_weight_only(), lowbit.int4_weight_only(group_size=32), lowbit.int8_dynamic_activation_int8_weight())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 40))


def check_against_the_cpu(function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], device: str) -> None:
    """Its result there is that of the CPU, and so are its gradients."""
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [tensor.detach().to(device).requires_grad_() for tensor in here]
    mine, theirs = function(*here), function(*there)
    torch.testing.assert_close(theirs.cpu(), mine)
    mine.sum().backward()
    theirs.sum().backward()
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)
