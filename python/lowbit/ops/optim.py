# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps over lists of tensors, in place: `_C.OptimStep` in eager mode, and an opaque op for torch.compile.

The op is defined with `torch.library`, because the C shims do not support lists of tensors. It runs once per step, so
its overhead does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops.registration import define
from lowbit.ops.tracing import is_traced

SCHEMA = (
    "optim_step_(int rule, int state_format, int block_size, Tensor(a!)[] params, Tensor(b!)[] grads, "
    "Tensor(c!)[] states, Tensor(d!)[] scales, Tensor(e!)[] steps, Tensor lr, float[] hyper, "
    "Tensor? grad_scale=None, Tensor? found_inf=None, int? seed=None, Tensor(f!)[]? corrections=None) -> ()"
)
HYPER = tuple(name for name in _C.OPTIM_HYPER if name != "lr")
"""Names of the hyperparameters in the order of the op's ``hyper``."""


@dataclass(slots=True)
class StepLists:
    """The tensors of one call. Parameter i has grads[i] and steps[i]; its moment k is in states[k][i] and
    scales[k][i]. corrections[i] is its correction, unless there are none."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    scales: list[list[Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    corrections: list[Tensor] | None = None

    def only(self, i: int) -> StepLists:
        """Return the lists of parameter i alone."""

        def of(tensors: list[Tensor]) -> list[Tensor]:
            return tensors[i : i + 1]

        corrections = None if self.corrections is None else of(self.corrections)
        return StepLists(
            of(self.params), of(self.grads), [*map(of, self.states)], [*map(of, self.scales)], of(self.steps),
            corrections,
        )  # fmt: skip


@dataclass(slots=True)
class Step:
    """One optimizer step for all parameters of ``lists``.

    ``rule`` is a name in `_C.OPTIM_RULES`, and ``state_format`` a name in `_C.STATE_FORMATS`, the format of the
    moments.
    """

    rule: str
    state_format: str
    block_size: int
    lists: StepLists
    lr: float | Tensor
    hyper: dict[str, float | bool]
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int | None = None

    def take_compiled(self) -> None:
        """Add the op to the graph that is being traced."""
        lr = _checked_lr(self.lr)
        lr = lr if isinstance(lr, Tensor) else torch.zeros((), dtype=torch.float64, device="cpu") + lr
        hyper = [float(self.hyper.get(name, 0.0)) for name in HYPER]
        self._given_to(torch.ops.lowbit.optim_step_, _flat(self.lists.states), _flat(self.lists.scales), lr, hyper)

    def checked(self) -> _C.OptimStep:
        """Return the step for `_C`, after all of its checks have passed."""
        hyper = {"lr": float(_checked_lr(self.lr)), **self.hyper}
        return self._given_to(_C.OptimStep, self.lists.states, self.lists.scales, hyper)

    def _given_to(self, call: Callable[..., Any], states: Sequence[Any], scales: Sequence[Any], *hyper: Any) -> Any:
        lists = self.lists
        return call(
            _C.OPTIM_RULES[self.rule]["number"], _C.STATE_FORMATS[self.state_format], self.block_size,
            lists.params, lists.grads, states, scales, lists.steps,
            *hyper, self.grad_scale, self.found_inf, self.seed, lists.corrections,
        )  # fmt: skip


def _checked_lr(lr: Any) -> float | Tensor:
    if isinstance(lr, Tensor) and lr.numel() == 1 and not lr.is_complex():
        return lr
    if isinstance(lr, Real):
        return lr if is_traced() else float(lr)
    got = f"a tensor {list(lr.shape)} of {lr.dtype}" if isinstance(lr, Tensor) else repr(lr)
    raise TypeError(f"optim_step: lr must be a number or a tensor of one number, got {got}")


def check(steps: Sequence[Step]) -> None:
    """Make all checks of the steps, and change nothing."""
    for step in steps:
        step.checked()


def take(steps: Sequence[Step]) -> None:
    """Take all steps, after the checks of all of them.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape or strides, or lr is not a number. Then no step has
            changed anything.
    """
    if is_traced():
        for step in steps:
            step.take_compiled()
        return
    ready = [step.checked() for step in steps]
    # This call does not go through torch's dispatcher, so torch's profiler only shows it if it is recorded explicitly.
    seen = torch.autograd._profiler_enabled()
    with torch.profiler.record_function("lowbit::optim_step_") if seen else contextlib.nullcontext():
        for step in ready:
            step.run()
    for step in steps:
        torch.autograd.graph.increment_version(step.lists.params)
        if step.grad_scale is not None:  # gradients are unscaled in place
            torch.autograd.graph.increment_version(step.lists.grads)


def _op(rule, state_format, block_size, params, grads, states, scales, steps, lr, hyper, *others):
    states, scales = _split(states, len(params)), _split(scales, len(params))
    values = dict(zip(HYPER, hyper, strict=True), lr=float(_checked_lr(lr)))
    given = rule, state_format, block_size, params, grads, states, scales, steps, values, *others
    _C.OptimStep(*given).run()


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _split(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    return [tensors[start : start + count] for start in range(0, len(tensors), count)] if count else []


define(SCHEMA, _op, lambda *arguments, **options: None)
