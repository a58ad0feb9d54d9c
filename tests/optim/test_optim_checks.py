# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused with the words of torch's own optimizers, and before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Case, copies, equal, parameters, set_grads

from lowbit import optim
from lowbit.ops.optim import HYPER

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


CHANGED = [
    ({"state_format": "abacus"}, "Invalid state_format value: 'abacus'"),
    ({"state_format": None}, "Invalid state_format value: None"),
    ({"block_size": None}, "Invalid block_size value: None"),
    ({"min_8bit_size": "many"}, "Invalid min_8bit_size value: many"),
    ({"betas": (0.9,)}, "Invalid betas value"),
    ({"eps": None}, "Invalid epsilon value: None"),
    ({"weight_decay": None}, "Invalid weight_decay value: None"),
    ({"maximize": "yes"}, "Invalid maximize value: 'yes'"),
    *((options, message) for options, message in BAD if "lr" not in options),
]


@pytest.mark.parametrize("options, message", CHANGED, ids=str)
def test_options_that_are_changed_later_are_checked_before_a_step_changes_anything(options: dict[str, Any], message: str, subtests: pytest.Subtests) -> None:
    params = parameters()
    optimizer = optim.AdamW8bit([{"params": params[:1]}, {"params": params[1:]}])
    set_grads(params, seed=0)
    optimizer.step()
    before = copies(params)
    optimizer.param_groups[1].update(options)
    for call in (optimizer.step, optimizer.state_dict):
        with subtests.test(call=call.__name__), pytest.raises(ValueError, match=message):
            call()
    assert equal(params, before)


@pytest.mark.parametrize("lr", [None, "fast", torch.zeros(2), torch.zeros((), dtype=torch.complex64), [1e-3]], ids=str)
def test_a_learning_rate_that_is_no_number_is_refused_by_name(lr: Any) -> None:
    params = parameters()
    set_grads(params, seed=0)
    optimizer = optim.AdamW8bit(params)
    optimizer.param_groups[0]["lr"] = lr
    before = copies(params)
    for call in (optimizer.step, lambda: torch.ops.lowbit.optim_step_(*OP, lr, [0.0] * len(HYPER))):
        with pytest.raises((TypeError, RuntimeError), match="lr"):
            call()
    with pytest.raises(TypeError, match="optim_step: lr must be a number or a tensor of one number, got "):
        optimizer.step()
    with pytest.raises(TypeError, match="optim_step: lr must be a number or a tensor of one number, got None"):
        torch.ops.lowbit.optim_step_(*OP, None, [0.0] * len(HYPER))
    assert equal(params, before)


OP = (0, 0, 256, [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(3)] * 2, [], [torch.zeros(())])
"""The arguments of `optim_step_` before lr: AdamW with float32 states."""


def test_a_scheduler_may_take_lr_below_zero_by_a_rounding() -> None:
    params = parameters()
    set_grads(params, seed=0)
    optimizer = optim.AdamW8bit(params, lr=1e-3)
    optimizer.param_groups[0]["lr"] = -1e-20
    optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)


def test_options_of_groups_and_other_rules(subtests: pytest.Subtests) -> None:
    for group, message in (({"optim_bits": 5}, "Invalid optim_bits value: 5"), ({"state_format": "int3"}, "Invalid state_format value: 'int3'")):
        with subtests.test(message), pytest.raises(ValueError, match=message):
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
