# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused with the words of torch's own optimizers, and before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Case, copies, equal, parameters, set_grads

from lowbit import optim

BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"lr": torch.zeros(2)}, "Tensor lr must be 1-element"),
    ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    ({"block_size": 100}, "Invalid block_size value: 100"),
    ({"block_size": 8192}, "Invalid block_size value: 8192"),
    ({"min_8bit_size": -1}, "Invalid min_8bit_size value: -1"),
]


@pytest.mark.parametrize("options, message", BAD, ids=str)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.AdamW8bit(parameters(), **options)
    params = parameters()
    optimizer = optim.AdamW8bit(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


def test_options_of_groups_and_other_rules() -> None:
    for group, message in (({"optim_bits": 5}, "Invalid optim_bits value: 5"), ({"state_format": "int3"}, "Invalid state_format value: 'int3'")):
        with pytest.raises(ValueError, match=message):
            optim.AdamW8bit([{"params": parameters(), **group}])
    with pytest.raises(ValueError, match="Invalid momentum value: -0.5"):
        optim.SGD8bit(parameters(), momentum=-0.5)
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero dampening"):
        optim.SGD8bit(parameters(), momentum=0.0, nesterov=True)
    with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
        optim.Lion8bit(parameters(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="Invalid state_dtype value: torch.float16"):
        optim.AdamW(parameters(), state_dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_that_are_not_served(case: Case, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"parameters must be float32, bfloat16 or float16, got {dtype}"):
        case.make([nn.Parameter(torch.zeros(3, dtype=dtype))])


def test_another_device(case: Case) -> None:
    with pytest.raises(ValueError, match="parameters must be on the CPU, got meta"):
        case.make([nn.Parameter(torch.zeros(3, device="meta"))])


def test_a_sparse_gradient_is_refused_and_nothing_has_moved(case: Case) -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    params = [*parameters(), embedding.weight]
    set_grads(params[:3])
    embedding(torch.tensor([3])).sum().backward()
    before = copies(params)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        case.make(params).step()
    assert equal(params, before)
