# SPDX-License-Identifier: Apache-2.0
"""Parameters of every kind: frozen ones of any kind, empty ones, any strides; default dtype and device; copies on write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings import ambient
from torch import nn
from twins import Case, copies, equal, parameters, run, set_grads, states

import lowbit
from lowbit import optim

FROZEN = {
    "int8": lambda: torch.zeros(8, 4, dtype=torch.int8),
    "uint8": lambda: torch.zeros(8, 4, dtype=torch.uint8),
    "bool": lambda: torch.zeros(3, dtype=torch.bool),
    "float64": lambda: torch.zeros(3, dtype=torch.float64),
    "complex64": lambda: torch.zeros(3, dtype=torch.complex64),
    "meta": lambda: torch.zeros(3, device="meta"),
    "expanded": lambda: torch.zeros(3, 1).expand(3, 5),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_parameter_may_be_anything_and_is_ignored_as_by_torch(case: Case, kind: str) -> None:
    def built(make: Any, frozen: Any = FROZEN[kind]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = [nn.Parameter(frozen(), requires_grad=False), *parameters()]
        return params, make(params, lr=0.01)

    params, optimizer = built(case.make)
    twin_params, twin = built(case.twin, lambda: torch.zeros(3))  # torch's Adagrad has a state of it, whatever it is
    run(optimizer, params[1:], 2)
    run(twin, twin_params[1:], 2)
    ours, theirs = optimizer.state_dict(), twin.state_dict()
    stepped = [index for index in theirs["state"] if index]
    assert list(ours["state"]) == stepped == [1, 2, 3]
    assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"] == [0, 1, 2, 3]
    again_params, again = built(case.make)
    again.load_state_dict(copy.deepcopy(ours))
    for p, q in zip(params[1:], again_params[1:], strict=True):
        q.data.copy_(p)
    run(optimizer, params[1:], 1, seed=4)
    run(again, again_params[1:], 1, seed=4)
    assert equal(params[1:], again_params[1:])


@pytest.mark.parametrize("make", (optim.AdamW8bit, optim.Adam4bit, optim.SGD8bit, optim.Lion8bit))
def test_the_parameters_of_a_quantized_model_go_to_an_optimizer(make: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 128))
    lowbit.quantize_(model, lowbit.Int8WeightOnlyConfig())
    optimizer = make(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_parameter_that_is_unfrozen_later_is_checked_then() -> None:
    params = [nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False), nn.Parameter(torch.zeros(3))]
    optimizer = optim.AdamW8bit(params)
    params[0].requires_grad_(True)
    params[0].grad, params[1].grad = torch.ones(3, dtype=torch.float64), torch.ones(3)
    with pytest.raises(ValueError, match="AdamW8bit: parameters must be float32, bfloat16 or float16, got torch.float64"):
        optimizer.step()
    assert bool((params[1] == 0).all())


def test_a_tensor_that_wants_no_gradient_but_has_one_is_stepped_as_by_torch(case: Case) -> None:
    p, q = torch.ones(64, 128), torch.ones(64, 128)
    ours, theirs = case.make([p], lr=0.01), case.twin([q], lr=0.01)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours.step()
    theirs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 5), (1, 0, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_without_elements(case: Case, shape: tuple[int, ...], transposed: bool) -> None:
    p = nn.Parameter(torch.zeros(shape).transpose(0, 1) if transposed else torch.zeros(shape))
    optimizer = case.make([{"params": [p], "min_8bit_size": 0}])
    p.grad = torch.zeros(shape).transpose(0, 1).contiguous() if transposed else torch.zeros(shape)
    optimizer.step()
    other = case.make([{"params": [p], "min_8bit_size": 0}])
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert float(other.state[p]["step"]) == 2


def with_gaps(values: torch.Tensor, kind: str) -> torch.Tensor:
    rows, columns = values.shape
    if kind == "columns":
        return torch.zeros(rows, 2 * columns)[:, ::2].copy_(values)
    if kind == "slice":
        return torch.zeros(rows, columns + 3)[:, 1 : columns + 1].copy_(values)
    if kind == "rows":
        return torch.zeros(3 * rows, columns)[::3].copy_(values)
    if kind == "transposed slice":
        return torch.zeros(columns, rows + 5)[:, :rows].t().copy_(values)
    return torch.zeros(columns, rows).t().copy_(values)


@pytest.mark.parametrize("kind", ["columns", "slice", "rows", "transposed slice", "transposed"])
def test_strides_of_a_parameter_do_not_matter(case: Case, kind: str) -> None:
    values = torch.randn(83, 71)
    strided = with_gaps(values, kind)
    around = strided._base.clone()
    p, q = nn.Parameter(strided), nn.Parameter(values.t().contiguous().t() if "transposed" in kind else values.clone())
    p.data = strided
    first, second = (case.make([{"params": [param], "min_8bit_size": 0}], lr=0.01) for param in (p, q))
    address, stride = p.data_ptr(), p.stride()
    for seed in range(3):
        set_grads([p], [q], seed=seed)
        for optimizer in (first, second):
            optimizer.step()
    assert torch.equal(p, q) and (p.data_ptr(), p.stride()) == (address, stride)
    with torch.no_grad():
        p.zero_()
        around.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    assert torch.equal(strided._base, around), "what lies between the elements is left alone"
    other = case.make([{"params": [p], "min_8bit_size": 0}])
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(value, other.state[p][name]) for name, value in first.state[p].items())


def test_strided_parameters_with_a_grad_scaler_and_a_closed_gate(case: Case) -> None:
    p = nn.Parameter(torch.empty(0))
    p.data = with_gaps(torch.randn(64, 128), "columns")
    optimizer = case.make([p], lr=0.01)
    before = p.detach().clone()
    p.grad = torch.full((64, 128), 1024.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(p, before)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not torch.equal(p, before) and bool((p.grad == 1).all())


@pytest.mark.parametrize(
    "overlapping",
    [torch.zeros(3, 1).expand(3, 5), torch.zeros(1).expand(4), torch.zeros(8).as_strided((3, 3), (1, 1))],
    ids=["expanded", "one element", "as_strided"],
)
def test_overlapping_parameters_are_refused_when_they_are_added(case: Case, overlapping: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"elements of a parameter must not share memory .* got shape \[[34]"):
        case.make([nn.Parameter(overlapping)])


@pytest.mark.parametrize("setting", ["dtype float64", "dtype bfloat16", "dtype float16", "device meta"])
def test_default_dtype_and_device_do_not_matter(case: Case, setting: str) -> None:
    params, other_params = parameters(), parameters()
    reference = case.make(other_params, lr=0.01)
    run(reference, other_params, 2)
    with ambient(f"default {setting}"):
        optimizer = case.make(params, lr=0.01)
        for p, q in zip(params, other_params, strict=True):
            p.grad = q.grad
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_params = copies(params)
    second = case.make(run_params, lr=0.01)
    for seed in range(2):
        set_grads(params, run_params, seed=seed)
        second.step()
        with ambient(f"default {setting}"):
            optimizer.step()
    assert equal(params, run_params) and equal(params, other_params)
    assert all(state["step"].dtype == torch.float32 and state["step"].device.type == "cpu" for state in states(optimizer))


@pytest.mark.skipif(not hasattr(torch, "_lazy_clone"), reason="this torch has no copies on write")
def test_a_copy_on_write_is_not_written_through(case: Case) -> None:
    params = parameters()
    optimizer = case.make(params, lr=0.01)
    run(optimizer, params, 2)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    set_grads(params, seed=3)
    tensors = [*params, *(p.grad for p in params), *(value for state in states(optimizer) for value in state.values())]
    lazy = [torch._lazy_clone(tensor.detach()) for tensor in tensors]  # both sides copy when they are written
    kept = [tensor.detach().clone() for tensor in tensors]
    assert all(torch._C._is_cow_tensor(tensor) for tensor in lazy if tensor.numel())
    optimizer.step()
    assert equal(lazy, kept)
    assert not any(torch.equal(tensor, clone) for tensor, clone in zip(params, lazy, strict=False))


def test_the_optimizers_of_a_quantized_model_in_a_new_process(python: Callable[..., str]) -> None:
    code = "import torch; torch.set_default_dtype(torch.float64); from lowbit import optim; p = torch.nn.Parameter(torch.ones(4096).float()); " \
           "p.grad = torch.ones_like(p); optim.AdamW8bit([p]).step(); assert (p != 1).all()"  # fmt: skip
    python(code)


def test_a_stack_of_experts_is_stepped_as_its_elements_are(case: Case) -> None:
    """Three dimensions change nothing: blocks of states are of elements in the order of memory."""
    start = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    stack, flat = nn.Parameter(start.clone()), nn.Parameter(start.flatten().clone())
    one, other = case.make([stack], lr=0.01), case.make([flat], lr=0.01)
    for seed in range(3):
        stack.grad = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(seed))
        flat.grad = stack.grad.flatten().clone()
        one.step()
        other.step()
    assert torch.equal(stack.flatten(), flat) and not torch.equal(stack, start)
