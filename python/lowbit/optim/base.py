# SPDX-License-Identifier: Apache-2.0
"""The optimizer that all rules share: state per parameter, param groups, one fused step per group and state format.

The state of a parameter is plain tensors: ``step`` (float32), and per moment its values or codes (``exp_avg``) and,
when quantized, its scales (``exp_avg_scale``). A DTensor's state is DTensors over the same mesh; a step works on
the local shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit._C import OPTIM_RULES, STATE_FORMATS
from lowbit.ops.optim import Step, take
from lowbit.ops.tracing import is_traced
from lowbit.optim import loading, moments, sharding
from lowbit.optim.checks import LARGEST_SEED, check_group, check_param
from lowbit.optim.moments import StateOptions
from lowbit.optim.plan import CallLists, Plan, plan
from lowbit.optim.state_format import BITS, Layout

_WITHOUT_EFFECT = {
    "args": None, "is_paged": False, "percentile_clipping": 100, "block_wise": True, "foreach": None, "fused": None,
    "capturable": False,
}  # fmt: skip
"""Arguments of bitsandbytes' and torch's optimizers that mean nothing here, with the value that asks for nothing."""


class LowBitOptimizer(torch.optim.Optimizer):
    """Base of every optimizer of `lowbit.optim`. A subclass names its rule, whose moments and numbers csrc/rules has.

    Each param group holds ``state_format``, ``block_size``, ``min_8bit_size`` and ``bf16_stochastic_round`` beside the
    rule's own options; a group may set them, or ``optim_bits`` (32, 16, 8 or 4), for its parameters alone.
    """

    RULE: ClassVar[str]
    DECOUPLED: ClassVar[bool] = False  # weight decay shrinks the parameter; else it is added to the gradient
    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf instead of unscaling

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_format: str,
        block_size: int,
        min_8bit_size: int = 4096,
        bf16_stochastic_round: bool = False,
        optim_bits: int | None = None,
        maximize: bool = False,
        **without_effect: Any,
    ) -> None:
        for name, value in without_effect.items():
            if name not in _WITHOUT_EFFECT:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
            if value != _WITHOUT_EFFECT[name]:
                warnings.warn(f"{type(self).__name__}: {name}={value!r} has no effect here", stacklevel=3)
        defaults = {
            **defaults,
            "rule": self.RULE,  # tells a checkpoint of another one, of which torch.distributed.checkpoint reads a part
            "maximize": maximize,
            "state_format": state_format if optim_bits is None else _format_of_bits(optim_bits),
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
            "bf16_stochastic_round": bf16_stochastic_round,
            "rounding_seed": torch.initial_seed() & LARGEST_SEED,
        }
        self._check_group(defaults)
        self._plans: dict[int, Plan] = {}
        self._checked: dict[int, dict[str, Any]] = {}  # options of each group, as they passed the check last
        self._layouts: dict[Tensor, Layout] = {}  # the layouts of the moments in self.state
        super().__init__(params, defaults)

    def _hyper(self, group: dict[str, Any]) -> dict[str, float | bool]:
        """Return the numbers of a step except lr, by their names in `_C.OPTIM_HYPER`."""
        shared = {"decoupled": self.DECOUPLED, "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
        betas = {"beta1": 0, "beta2": 1}
        own = {
            name: float(group["betas"][betas[name]]) if name in betas else group[name]
            for name in OPTIM_RULES[self.RULE]["reads"]
        }
        return {**shared, **own}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for options out of range, in torch's words. A rule with options of its own extends this."""
        if group["rule"] != self.RULE:
            raise ValueError(f"Invalid rule value: {group['rule']!r}, must be {self.RULE!r} of a {type(self).__name__}")
        check_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, and allocate their state."""
        if "optim_bits" in param_group:
            param_group = dict(param_group)
            param_group["state_format"] = _format_of_bits(param_group.pop("optim_bits"))
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trainable = [
            param for param in group["params"] if param.requires_grad
        ]  # the others may be anything, as long as they are frozen
        try:
            for param in trainable:
                check_param(param, type(self).__name__)
        except ValueError:
            self.param_groups.pop()
            raise
        # 1000 tensors: 7 ms that the first step would take
        options = StateOptions.of(self.RULE, group)
        self._plans[len(self.param_groups) - 1] = self._new_plan(trainable, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: a sparse gradient.
            ValueError: the constructor would not take an option of a group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_changed_options()
        plans = [self._plan(index, group) for index, group in enumerate(self.param_groups)]
        for index in range(len(plans), len(self._plans)):  # plans of groups that were removed
            self._plans.pop(index, None)
        calls = [
            (index, group, lists, lists.with_gradients())
            for index, (group, planned) in enumerate(zip(self.param_groups, plans, strict=True))
            for lists in planned.calls
        ]
        take(
            [
                Step(
                    self.RULE, lists.state_format, group["block_size"], stepped, group["lr"], self._hyper(group),
                    getattr(self, "grad_scale", None), getattr(self, "found_inf", None), _seed(group, index, lists),
                )
                for index, group, lists, stepped in calls
            ]
        )  # fmt: skip
        for _, _, lists, stepped in calls:
            lists.write_back(stepped)
        return loss

    def _check_changed_options(self) -> None:
        """Raise ValueError for an option of a group that was changed to a value that no step could serve, before
        anything changes. Not for lr, which schedulers may take below 0: `take` has its check."""
        if is_traced():
            return
        for index, group in enumerate(self.param_groups):
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if options != self._checked.get(index):
                self._check_group({**options, "lr": 0.0})
                self._checked[index] = options

    def _plan(self, index: int, group: dict[str, Any]) -> Plan:
        """Return the plan of a group's step, the last one while it serves."""
        with_grad = [param for param in group["params"] if param.grad is not None]
        options = StateOptions.of(self.RULE, group)
        if is_traced():
            return self._new_plan(with_grad, options)
        known = self._plans.get(index)
        if known is None or not known.serves(with_grad, [self.state[param] for param in with_grad], options):
            known = self._plans[index] = self._new_plan(with_grad, options)
            moments.forget(self._layouts, self.state)
        return known

    def _new_plan(self, params: list[Tensor], options: StateOptions) -> Plan:
        layouts = [self._prepare_state(param, options) for param in params]
        return plan(params, [self.state[param] for param in params], layouts, options)

    def _prepare_state(self, param: Tensor, options: StateOptions) -> Layout:
        """Make or convert the state of a parameter where that is needed; return how its moments lie."""
        kept, owner = self._layouts.get(param), type(self).__name__
        layout = moments.prepare(self.RULE, options, param, self.state[param], kept, owner)
        if layout != kept:
            self._layouts[param] = layout
        return layout

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, after converting moments to the memory order that their
        parameters have now.

        4-bit codes do not say their order: a loader reads them in that of the parameter.

        Raises:
            ValueError: the constructor would not take an option of a group.
        """
        self._check_changed_options()
        for group in self.param_groups:
            options = StateOptions.of(self.RULE, group)
            for param in group["params"]:
                kept = self._layouts.get(param) if self.state.get(param) else None
                if kept is not None and kept.shape == sharding.local(param).shape:
                    self._prepare_state(param, options)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the same rule in torch, torchao or bitsandbytes, in any
        of their formats.

        Moments are converted to the format that each parameter has here. A saved state format that is the one wanted is
        taken bit for bit.

        Raises:
            ValueError: other parameter groups, a moment that is missing, or one whose size does not fit its parameter.
        """
        target = loading.Target(self, self.RULE, self._check_group, self._layouts)
        loading.load(target, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layouts": self._layouts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._checked = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _seed(group: dict[str, Any], index: int, lists: CallLists) -> int | None:
    """Return the seed of stochastic rounding of one call: no two calls of a step share one."""
    if not group["bf16_stochastic_round"]:
        return None
    call = len(STATE_FORMATS) * index + STATE_FORMATS[lists.state_format]
    return (group["rounding_seed"] + call + (lists.place << 32)) & LARGEST_SEED


def _format_of_bits(optim_bits: int) -> str:
    if optim_bits not in BITS:
        raise ValueError(f"Invalid optim_bits value: {optim_bits}, must be 32, 16, 8 or 4")
    return BITS[optim_bits]
