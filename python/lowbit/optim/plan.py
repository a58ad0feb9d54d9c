# SPDX-License-Identifier: Apache-2.0
"""What a step of one param group needs, found once: lists of the tensors themselves, by state format.

A plan holds the very tensors of parameters and states, which the step reads anew each time: what `.data =` puts into
them is followed. The exceptions are views of the local tensors of DTensors, whose addresses are compared. Everything
else that a plan was made from is compared by `serves`; gradients are looked up at each step and let go after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.ops.optim import StepLists
from lowbit.optim import sharding
from lowbit.optim.state_format import Layout, has_codes

if TYPE_CHECKING:
    from lowbit.optim.base import LowBitOptimizer


class Plan:
    """Lists of the parameters of ``group`` that have a gradient now, their states made or converted where
    that is needed."""

    def __init__(self, optimizer: LowBitOptimizer, group: dict[str, Any], params: list[Tensor]) -> None:
        self.optimizer = optimizer
        self.moments = tuple(optimizer._moments(group))
        self.options = self._options(group)
        self.params = params
        self.ids = [id(param) for param in params]
        self.by_format: dict[str, StepLists] = {}
        self.members: dict[str, list[Tensor]] = {}  # parameters, as the gradients are found on them
        self.with_gaps: list[tuple[StepLists, int, Tensor, Layout]] = []  # parameters that are stepped in a dense copy
        self.sharded: list[Tensor] = []  # DTensors, of which the lists hold local views
        for param in params:
            self._add(group, param)
        self.kept = [
            [*optimizer.state[param].values()] for param in params
        ]  # held: an identity must not be given to another tensor
        self.kept_ids = self._state_ids()
        self.places = self._places()

    def _add(self, group: dict[str, Any], param: Tensor) -> None:
        layout = self.optimizer._prepare_state(group, param)
        state, state_format = self.optimizer.state[param], layout.state_format
        local = sharding.local(param)
        if torch.compiler.is_compiling():
            local = local.detach()
        if state_format not in self.by_format:
            scales: list[list[Tensor]] = [[] for _ in self.moments] if has_codes(state_format) else []
            self.by_format[state_format] = StepLists(states=[[] for _ in self.moments], scales=scales)
            self.members[state_format] = []
        lists = self.by_format[state_format]
        if not _is_dense(local, layout):
            self.with_gaps.append((lists, len(lists.params), local, layout))
        if sharding.is_dtensor(param):
            self.sharded += [param, *(value for value in state.values() if sharding.is_dtensor(value))]
        lists.params.append(local)
        lists.steps.append(state["step"])
        for k, name in enumerate(self.moments):
            values, scale = sharding.local_moment(state[name], state.get(f"{name}_scale"), layout)
            lists.states[k].append(values)
            if lists.scales:
                lists.scales[k].append(scale)
        self.members[state_format].append(param)

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return group["state_format"], group["min_8bit_size"], group["block_size"], tuple(self.optimizer._moments(group))

    def _state_ids(self) -> list[list[int]]:
        state = self.optimizer.state
        return [[*map(id, state[param].values())] for param in self.params]

    def _places(self) -> list[Any]:
        """What says that a parameter lies as it did, and that views of local tensors still are of them."""
        places: list[Any] = [(param.shape, param.stride()) for param in self.params]
        if self.sharded and not torch.compiler.is_compiling():
            local = [sharding.local(tensor) for tensor in self.sharded]
            places += [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in local]
        return places

    def serves(self, group: dict[str, Any], params: list[Tensor]) -> bool:
        """Return whether a step of these parameters may use the lists."""
        return (
            self.ids == [id(param) for param in params]
            and self.options == self._options(group)
            and self.kept_ids == self._state_ids()
            and self.places == self._places()
        )

    def lists(self) -> dict[str, StepLists]:
        """Return the lists with the gradients of now, and dense copies of parameters that have gaps."""
        for lists, index, param, layout in self.with_gaps:
            lists.params[index] = layout.empty(param.dtype).copy_(param)
        for state_format, lists in self.by_format.items():
            lists.grads = [
                _local_grad(param, local, bool(self.sharded))
                for param, local in zip(self.members[state_format], lists.params, strict=True)
            ]
        return self.by_format

    def finish(self) -> None:
        """Write back what was stepped in a copy."""
        for lists, index, param, _ in self.with_gaps:
            param.copy_(lists.params[index])

    def release(self) -> None:
        """Let go of gradients and copies: zero_grad is to free their memory."""
        for lists in self.by_format.values():
            lists.grads = []
        for lists, index, param, _ in self.with_gaps:
            lists.params[index] = param


def _is_dense(local: Tensor, layout: Layout) -> bool:
    if layout.stride is None:
        return local.is_contiguous()
    sizes = zip(local.shape, local.stride(), layout.stride, strict=True)
    return local.numel() == 0 or all(size == 1 or ours == dense for size, ours, dense in sizes)


def _local_grad(param: Tensor, local: Tensor, sharded: bool) -> Tensor:
    """Return the gradient in the memory order of its (local) parameter; one in another order is replaced, as it may be
    unscaled in place."""
    grad = sharding.local(param.grad) if sharded else param.grad
    if grad.layout is not torch.strided:
        raise RuntimeError(f"lowbit.optim does not support sparse gradients, got {grad.layout}")
    if grad.stride() == local.stride() and (torch.compiler.is_compiling() or not grad.is_neg()):
        return grad
    ordered = torch.empty_like(local, dtype=grad.dtype, requires_grad=False).copy_(grad)
    if not (sharded and sharding.is_dtensor(param)):
        param.grad = ordered
    return ordered
