# SPDX-License-Identifier: Apache-2.0
"""The plan of one param group's step, which is reused: lists of tensors by state format and device, those with
corrections apart.

A plan has references to the parameters and states themselves, so data that is assigned with `.data =` is seen in the
next step. The exceptions are views of the local tensors of DTensors, whose addresses are compared. `serves` compares
everything else that the plan depends on; gradients are looked up in each step.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.ops.optim import StepLists
from lowbit.ops.tracing import is_traced
from lowbit.optim import correction, sharding
from lowbit.optim.moments import StateOptions
from lowbit.optim.state_format import Layout, has_codes


@dataclass(frozen=True, slots=True)
class CallLists:
    """The lists of one call, without gradients: the parameters on one device with one state format, either
    all with a correction or none."""

    state_format: str
    device_index: int  # index of the device in the plan
    members: list[Tensor]  # the parameters, whose .grad is read
    is_sharded: bool  # whether some parameters are DTensors
    params: list[Tensor]  # local tensors
    gaps: dict[int, Layout]  # parameters that are not dense or not plain tensors, by index; a dense copy is stepped
    states: list[list[Tensor]]  # one list per moment
    scales: list[list[Tensor]]
    steps: list[Tensor]
    corrections: list[Tensor] | None

    @classmethod
    def of(
        cls,
        device_index: int,
        params: list[Tensor],
        states: list[dict[str, Any]],
        layouts: list[Layout],
        options: StateOptions,
    ) -> CallLists:
        local = [sharding.local(param) for param in params]
        if is_traced():
            local = [param.detach() for param in local]
        stored = [
            [sharding.local_moment(state[name], state.get(f"{name}_scale"), layout) for name in options.moments]
            for state, layout in zip(states, layouts, strict=True)
        ]
        gaps = {
            index: layout
            for index, (param, layout) in enumerate(zip(local, layouts, strict=True))
            if not _is_dense(param, layout)
        }
        values = [[moment[0] for moment in by_param] for by_param in zip(*stored, strict=True)]
        scales = [[moment[1] for moment in by_param] for by_param in zip(*stored, strict=True)]
        return cls(
            state_format=layouts[0].state_format,
            device_index=device_index,
            members=params,
            is_sharded=any(map(sharding.is_dtensor, params)),
            params=local,
            gaps=gaps,
            states=values,
            scales=scales if has_codes(layouts[0].state_format) else [],
            steps=[state["step"] for state in states],
            corrections=(
                [sharding.local(state[correction.NAME]) for state in states] if options.corrects(params[0]) else None
            ),
        )

    def with_gradients(self) -> StepLists:
        """Return the lists with the current gradients, and with dense copies of parameters that are not dense."""
        params = self.params
        if self.gaps:
            params = [*params]
            for index, layout in self.gaps.items():
                params[index] = layout.empty(params[index].dtype).copy_(params[index])
        grads = [sharding.local(member.grad) if self.is_sharded else member.grad for member in self.members]
        if sparse := [grad.layout for grad in grads if grad.layout is not torch.strided]:
            raise RuntimeError(f"lowbit.optim does not support sparse gradients, got {sparse[0]}")
        if [grad.stride() for grad in grads] != [param.stride() for param in params] or _any_is_negated(grads):
            grads = [_in_order(*each) for each in zip(grads, params, self.members, strict=True)]
        return StepLists(params, grads, self.states, self.scales, self.steps, self.corrections)

    def write_back(self, stepped: StepLists) -> None:
        """Copy the results back to the parameters that were stepped in a dense copy."""
        for index in self.gaps:
            self.params[index].copy_(stepped.params[index])


@dataclass(frozen=True, slots=True)
class Plan:
    """The lists of a step, and the values that they depend on."""

    calls: list[CallLists]
    options: StateOptions
    params: list[Tensor]
    entries: list[Any]  # entries of the states of all parameters
    counts: list[int]  # number of entries of each state
    sharded: list[Tensor]  # DTensors, of which the lists hold local views
    memory: list[Any]

    def serves(self, params: list[Tensor], states: list[dict[str, Any]], options: StateOptions) -> bool:
        """Return whether a step of these parameters may use the lists."""
        return (
            self.options == options
            and _are_the_same(self.params, params)
            and self.counts == [*map(len, states)]
            and _are_the_same(self.entries, _entries(states))
            and self.memory == _memory(params, self.sharded, options)
        )


def plan(params: list[Tensor], states: list[dict[str, Any]], layouts: list[Layout], options: StateOptions) -> Plan:
    """Return the plan for the parameters of a group, with their states, the layouts of these, and the group's
    options."""
    calls, devices = [], list(dict.fromkeys(layout.device for layout in layouts))
    kinds = [
        (layout.state_format, layout.device, options.corrects(param))
        for param, layout in zip(params, layouts, strict=True)
    ]
    for kind in dict.fromkeys(kinds):
        chosen = [index for index, other in enumerate(kinds) if other == kind]
        each = ([values[index] for index in chosen] for values in (params, states, layouts))
        calls.append(CallLists.of(devices.index(kind[1]), *each, options))
    pairs = zip(params, states, strict=True)
    tensors = [tensor for param, state in pairs if sharding.is_dtensor(param) for tensor in (param, *state.values())]
    sharded = [tensor for tensor in tensors if sharding.is_dtensor(tensor)]
    return Plan(
        calls=calls,
        options=options,
        params=params,
        entries=_entries(states),
        counts=[*map(len, states)],
        sharded=sharded,
        memory=_memory(params, sharded, options),
    )


def _entries(states: list[dict[str, Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable([state.values() for state in states])]


def _are_the_same(these: list[Any], those: list[Any]) -> bool:
    """Return whether both lists have the same objects. == would compare the values of tensors."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _memory(params: list[Tensor], sharded: list[Tensor], options: StateOptions) -> list[Any]:
    """Return a value that stays equal while parameters have the same shapes and strides, DTensors the same local
    tensors, and the same parameters need a correction."""
    memory: list[Any] = [*[param.shape for param in params], *[param.stride() for param in params]]
    if options.master:
        memory += [options.corrects(param) for param in params]
    if sharded and not is_traced():
        local = [sharding.local(tensor) for tensor in sharded]
        memory += [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in local]
    return memory


def _is_dense(local: Tensor, layout: Layout) -> bool:
    if is_traceable_wrapper_subclass(local):  # a wrapper of several tensors, such as Int8Weight
        return False
    if layout.stride is None:
        return local.is_contiguous()
    sizes = zip(local.shape, local.stride(), layout.stride, strict=True)
    return local.numel() == 0 or all(size == 1 or ours == dense for size, ours, dense in sizes)


def _any_is_negated(tensors: list[Tensor]) -> bool:
    """Return whether a tensor has the lazy negation bit set, which does not occur in traced graphs."""
    return not is_traced() and any(map(Tensor.is_neg, tensors))


def _in_order(grad: Tensor, param: Tensor, member: Tensor) -> Tensor:
    """Return a local gradient in the memory order of its parameter. A gradient in another order is replaced on the
    parameter, because the step may unscale it in place."""
    if grad.stride() == param.stride() and not _any_is_negated([grad]):
        return grad
    ordered = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
    if not sharding.is_dtensor(member):
        member.grad = ordered
    return ordered
