# SPDX-License-Identifier: Apache-2.0
"""A step's kept plan knows all that it depends on: data, states, options and gradients may change between steps.

The oracle is an optimizer that is made anew for every step and loads the state of the one before: it has nothing kept.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from settings import in_child
from torch import nn
from twins import Case, copies, equal, parameters, run, set_grads, states, trained

from lowbit import optim
from lowbit._C import STATE_FORMATS


def fresh(case: Case, optimizer: torch.optim.Optimizer) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """A copy of parameters and optimizer with nothing kept from earlier steps."""
    params = [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for group in optimizer.param_groups for p in group["params"]]
    other = case.make(params)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return params, other


def check_next_step(case: Case, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """The next step is that of an optimizer without a past, and what it would save decodes to the same."""
    other_params, other = fresh(case, optimizer)
    set_grads(params, other_params, seed=77)
    optimizer.step()
    other.step()
    assert equal(params, other_params)
    for mine, theirs in zip(states(optimizer), states(other), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def swap_states(optimizer: Any, change: Callable[[torch.Tensor], torch.Tensor], names: Callable[[str], bool] = lambda name: True) -> None:
    for state in states(optimizer):
        for name in filter(names, state):
            state[name].data = change(state[name].data)


def new_state_tensors(optimizer: Any, params: list[nn.Parameter]) -> None:
    for state in states(optimizer):
        state.update({name: value.clone() for name, value in state.items()})


def new_state_dicts(optimizer: Any, params: list[nn.Parameter]) -> None:
    for p in params:
        optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[p].items()}


def load_an_older_one(optimizer: Any, params: list[nn.Parameter]) -> None:
    older = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, 2, seed=3)
    optimizer.load_state_dict(older)


def fewer_gradients(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None
    optimizer.step()


def frozen_and_back(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[0].requires_grad_(False)
    params[0].grad = None
    optimizer.step()
    params[0].requires_grad_(True)


def another_dtype(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[0].grad = None
    params[0].data = params[0].data.bfloat16()


def other_addresses_of_the_same_size(optimizer: Any, params: list[nn.Parameter]) -> None:
    kept = params[0].data
    params[0].data = torch.zeros_like(kept)
    optimizer.step()
    params[0].data = kept


CHANGES: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "data of a parameter": lambda optimizer, params: setattr(params[0], "data", params[0].data.clone() + 1),
    "a parameter in place": lambda optimizer, params: params[0].data.mul_(2),
    "data of the states": lambda optimizer, params: swap_states(optimizer, torch.clone),
    "data of the states, other values": lambda optimizer, params: swap_states(optimizer, lambda t: t.flip(0).contiguous(), lambda name: name != "step"),
    "states in place": lambda optimizer, params: swap_states(optimizer, lambda t: t.mul_(2), lambda name: "scale" in name),
    "new state tensors": new_state_tensors,
    "new state dicts": new_state_dicts,
    "its own state_dict": lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "an older state_dict": load_an_older_one,
    "lr of another type": lambda optimizer, params: optimizer.param_groups[0].update(lr=torch.tensor(0.2)),
    "another lr": lambda optimizer, params: optimizer.param_groups[0].update(lr=0.3),
    "fewer gradients": fewer_gradients,
    "frozen and back": frozen_and_back,
    "another dtype": another_dtype,
    "other addresses of the same size": other_addresses_of_the_same_size,
    # A state dict before the next step has the order too.
    "another memory order": lambda optimizer, params: setattr(params[0], "data", params[0].data.t().contiguous().t()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_steps_is_followed(case: Case, change: Callable[[Any, list[nn.Parameter]], None]) -> None:
    params, optimizer = trained(case.make)
    change(optimizer, params)
    check_next_step(case, optimizer, params)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_its_own_parameters_and_states(case: Case, clone: Any) -> None:
    params, optimizer = trained(case.make)
    before = copies(params)
    twin_params, twin = clone((params, optimizer))
    check_next_step(case, twin, twin_params)
    assert equal(params, before)
    check_next_step(case, optimizer, params)


def test_a_group_that_is_added_or_taken_away(case: Case) -> None:
    params = parameters()
    together = case.make(params[:1], lr=0.01)
    run(together, params[:1], 1)
    together.add_param_group({"params": params[1:2], "lr": 0.1})
    together.add_param_group({"params": params[2:]})
    apart_params = copies(params)
    apart = [case.make([p], lr=lr) for p, lr in zip(apart_params, (0.01, 0.1, 0.01), strict=True)]
    apart[0].load_state_dict({"state": {0: together.state_dict()["state"][0]}, "param_groups": [{**together.param_groups[0], "params": [0]}]})
    for seed, gone in ((5, 0), (6, 1)):
        if gone:
            del together.param_groups[0]
        set_grads(params[gone:], apart_params[gone:], seed=seed)
        for optimizer in (together, *apart[gone:]):
            optimizer.step()
        assert equal(params[gone:], apart_params[gone:])
    assert len(together._plans) == 2


def test_a_parameter_put_in_the_place_of_another_takes_over_its_state(case: Case) -> None:
    """As scripts do that prune or grow a model."""
    params, optimizer = trained(case.make)
    old, new = params[0], nn.Parameter(params[0].detach().clone())
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    params[0] = new
    check_next_step(case, optimizer, params)
    assert old not in optimizer._layouts


@pytest.mark.parametrize("order", ["channels_last", "transposed"])
def test_another_memory_order_of_a_parameter_takes_its_moments_along(case: Case, order: str) -> None:
    """Codes and scales are of elements that follow each other in memory: they are encoded again, as far from torch as before."""
    values = torch.randn(16, 8, 8, 8)
    p, q = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    ours, theirs = case.make([p], lr=0.01), case.twin([q], lr=0.01)
    for seed in range(6):
        set_grads([p], [q], seed=seed)
        if seed == 3:
            p.data = p.data.to(memory_format=torch.channels_last) if order == "channels_last" else p.data.transpose(0, 1).contiguous().transpose(0, 1)
        if seed == 4:
            q.grad = q.grad  # the twin keeps its order
        p.grad = p.grad.contiguous()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.step()
        assert bool(caught) == (seed == 3 and any("scale" in name for name in ours.state[p])), seed
        theirs.step()
    assert (p - q).norm() <= 2 * case.drift * (q - values).norm() + 1e-4
    assert not p.is_contiguous() and float(ours.state[p]["step"]) == 6


def test_a_parameter_of_another_shape_is_refused_unless_it_never_stepped(case: Case) -> None:
    p = nn.Parameter(torch.randn(64, 128))
    optimizer = case.make([p], lr=0.01)
    p.data = torch.randn(100, 128)
    run(optimizer, [p], 1)
    p.grad = None
    p.data = torch.randn(128, 100)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"the state of a parameter must be for its shape \[128, 100\], got one for \[100, 128\]"):
        run(optimizer, [p], 1)
    assert torch.equal(p, before)
    del optimizer.state[p]
    run(optimizer, [p], 1)
    assert not torch.equal(p, before)


def test_options_of_the_state_may_change_in_a_group() -> None:
    p, q = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    ours, theirs = optim.AdamW([p], lr=0.01), torch.optim.AdamW([q], lr=0.01)
    wanted = [{}, {"state_format": "dynamic8"}, {"state_format": "dynamic4", "block_size": 64}, {"min_8bit_size": 10**6}, {"amsgrad": True}]
    for seed, options in enumerate(wanted):
        ours.param_groups[0].update(options)
        set_grads([p], [q], seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours.step()
        theirs.step()
    assert float(ours.state[p]["step"]) == len(wanted)
    assert ours.state[p]["exp_avg"].dtype == torch.float32 and set(ours.state[p]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert (p - q).norm() <= 0.3 * (q - 1).norm()


@pytest.mark.parametrize(
    "lost, error, words",
    [
        ("exp_avg_sq", ValueError, "the state of a parameter must have exp_avg_sq, got"),
        ("exp_avg_scale", TypeError, "scales must be .* got NoneType"),
    ],
)
def test_a_state_that_lost_a_moment_is_not_begun_anew(lost: str, error: type[Exception], words: str) -> None:
    params, optimizer = trained(optim.AdamW8bit, 1)
    del optimizer.state[params[0]][lost]
    with pytest.raises(error, match=words):
        run(optimizer, params, 1)


@pytest.mark.parametrize("kind", ["float32", "transposed", "expanded", "negated"])
def test_gradients_of_another_kind(case: Case, kind: str) -> None:
    values = torch.randn(64, 128)
    p, q = (nn.Parameter(values.clone().bfloat16()) for _ in range(2))
    first, second = case.make([p], lr=0.01), case.make([q], lr=0.01)
    run(first, [p], 2)
    run(second, [q], 2)
    p.grad = q.grad = None
    grad = {"float32": torch.randn(64, 128), "transposed": torch.randn(128, 64).bfloat16().t(), "expanded": torch.randn(64, 1).bfloat16().expand(64, 128),
            "negated": torch._neg_view(torch.randn(64, 128).bfloat16())}[kind]  # fmt: skip
    if kind == "float32":
        p.grad_dtype = q.grad_dtype = torch.float32
    p.grad, q.grad = grad, grad.resolve_neg().contiguous()
    first.step()
    second.step()
    assert torch.equal(p, q)


def test_gradients_are_let_go_after_a_step(case: Case) -> None:
    params, optimizer = trained(case.make)
    grads = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert all(grad() is None for grad in grads)


def test_a_step_that_is_refused_changes_no_group() -> None:
    params = parameters()
    optimizer = optim.AdamW8bit([{"params": [p]} for p in params])
    run(optimizer, params, 1)
    before = copies(params)
    set_grads(params, seed=2)
    optimizer.state[params[2]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="must have 19 elements"):
        optimizer.step()
    assert equal(params, before) and [float(state["step"]) for state in states(optimizer)] == [1, 1, 1]


def test_another_thread_and_two_at_once(case: Case) -> None:
    pairs = [trained(case.make, 1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: run(pair[1], pair[0], 3, 5), pairs))
    params, alone = trained(case.make, 1)
    run(alone, params, 3, seed=5)
    assert equal(params, pairs[0][0]) and equal(params, pairs[1][0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on_alone(case: Case) -> None:
    params, optimizer = trained(case.make)
    expected_params, expected = copy.deepcopy((params, optimizer))
    run(expected, expected_params, 1, seed=9)
    before = copies(params)

    def step() -> list[nn.Parameter]:
        torch.set_num_threads(1)  # torch's own fork rule: its OpenMP threads do not exist in a child
        run(optimizer, params, 1, seed=9)
        return params

    assert equal(in_child(step), expected_params)
    assert equal(params, before)


@pytest.mark.parametrize("first, then", list(itertools.permutations(STATE_FORMATS, 2)))
def test_a_training_goes_on_in_another_state_format(first: str, then: str) -> None:
    """With gradients whose squares are twelve decades apart: no update is far longer than torch's."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(8192))
    optimizer = optim.AdamW8bit([{"params": [param], "state_format": first}], lr=1e-2)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["state_format"] = then
        param.grad = torch.randn(8192) * 10.0 ** torch.randint(-6, 1, (8192,))
        before = param.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # moments are encoded again
            optimizer.step()
        assert float((param.detach() - before).abs().max()) <= 0.1
