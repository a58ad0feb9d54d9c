# SPDX-License-Identifier: Apache-2.0
"""The base class of all optimizers: state per parameter, param groups, one fused step per group and state format.

The state of a parameter consists of plain tensors: ``step`` (float32), and for each moment its values or codes
(``exp_avg``) and, if quantized, its scales (``exp_avg_scale``), and with ``master`` the ``correction``. The state of a DTensor consists of DTensors over the
same mesh; a step works on the local shards.
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
from lowbit.optim import correction, loading, moments, sharding
from lowbit.optim.checks import LARGEST_SEED, check_group, check_not_replaced, check_param, check_trainable
from lowbit.optim.moments import StateOptions
from lowbit.optim.plan import CallLists, Plan, plan
from lowbit.optim.state_format import BITS, Layout

_WITHOUT_EFFECT = {
    "args": None, "is_paged": False, "percentile_clipping": 100, "block_wise": True, "foreach": None, "fused": None,
    "capturable": False,
}  # fmt: skip
"""Arguments of bitsandbytes' and torch's optimizers that have no effect, with the values that do not cause a
warning."""


class LowBitOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers of `lowbit.optim`. A subclass names its update rule, which csrc/rules implements.

    Each param group has ``state_format``, ``block_size``, ``min_8bit_size``, ``bf16_stochastic_round`` and ``master``
    besides the options of the rule. A group may set these options, or ``optim_bits`` (32, 16, 8 or 4), for its own
    parameters.
    """

    RULE: ClassVar[str]
    DECOUPLED: ClassVar[bool] = False  # whether weight decay shrinks the parameter instead of changing the gradient
    _step_supports_amp_scaling = True  # GradScaler passes grad_scale and found_inf instead of unscaling

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_format: str,
        block_size: int,
        min_8bit_size: int = 4096,
        bf16_stochastic_round: bool = False,
        master: str | None = None,
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
            "rule": self.RULE,  # detects checkpoints of other rules, which torch.distributed.checkpoint partly reads
            "maximize": maximize,
            "state_format": state_format if optim_bits is None else _format_of_bits(optim_bits),
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
            "bf16_stochastic_round": bf16_stochastic_round,
            "master": master,
            "rounding_seed": torch.initial_seed() & LARGEST_SEED,
        }
        self._check_group(defaults)
        self._plans: dict[int, Plan] = {}
        self._checked: dict[int, dict[str, Any]] = {}  # options of each group that passed the last check
        self._layouts: dict[Tensor, Layout] = {}  # the layouts of the moments in self.state
        super().__init__(params, defaults)
        check_trainable([param for group in self.param_groups for param in group["params"]], type(self).__name__)

    def _hyper(self, group: dict[str, Any]) -> dict[str, float | bool]:
        """Return the hyperparameters of a step except lr, by their names in `_C.OPTIM_HYPER`."""
        shared = {"decoupled": self.DECOUPLED, "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
        betas = {"beta1": 0, "beta2": 1}
        own = {
            name: float(group["betas"][betas[name]]) if name in betas else group[name]
            for name in OPTIM_RULES[self.RULE]["reads"]
        }
        return {**shared, **own}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for options out of range, with torch's messages. A rule with further options extends
        this."""
        if group["rule"] != self.RULE:
            raise ValueError(f"Invalid rule value: {group['rule']!r}, must be {self.RULE!r} of a {type(self).__name__}")
        check_group(group)

    def _check_param(self, param: Tensor, group: dict[str, Any]) -> None:
        """Raise ValueError for a parameter that the optimizer does not support. A rule with further conditions extends
        this."""
        check_param(param, type(self).__name__, group["master"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options, and allocate their state."""
        if "optim_bits" in param_group:
            param_group = dict(param_group)
            param_group["state_format"] = _format_of_bits(param_group.pop("optim_bits"))
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trainable = [param for param in group["params"] if param.requires_grad]  # frozen parameters may be of any kind
        try:
            for param in trainable:
                self._check_param(param, group)
        except ValueError:
            self.param_groups.pop()
            raise
        # The state is allocated now, so that the first step is as fast as the others.
        options = StateOptions.of(self.RULE, group)
        self._plans[len(self.param_groups) - 1] = self._new_plan(trainable, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient do not change.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: a gradient is sparse.
            ValueError: an option of a group has a value that the constructor would reject, or a parameter belongs to a
                layer that was packed since and so has no gradient.
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
        steps = [
            Step(
                self.RULE, lists.state_format, group["block_size"], stepped, group["lr"], self._hyper(group),
                getattr(self, "grad_scale", None), getattr(self, "found_inf", None), _seed(group, index, lists),
            )
            for index, group, lists, stepped in calls
        ]  # fmt: skip
        self._take(steps, [group for _, group, _, _ in calls])
        for _, _, lists, stepped in calls:
            lists.write_back(stepped)
        return loss

    def _take(self, steps: list[Step], groups: list[dict[str, Any]]) -> None:
        """Take the steps, each of which belongs to one of the param groups."""
        take(steps)

    def _check_changed_options(self) -> None:
        """Raise ValueError if an option of a group was changed to an invalid value, before the step changes anything.

        lr is not checked here, because schedulers may make it negative; `take` checks it.
        """
        if is_traced():
            return
        for index, group in enumerate(self.param_groups):
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if options != self._checked.get(index):
                self._check_group({**options, "lr": 0.0})
                self._checked[index] = options

    def _plan(self, index: int, group: dict[str, Any]) -> Plan:
        """Return the plan of a group's step; the previous plan if it is still valid."""
        with_grad = [param for param in group["params"] if param.grad is not None]
        options = StateOptions.of(self.RULE, group)
        if is_traced():
            return self._new_plan(with_grad, options)
        known = self._plans.get(index)
        if known is None or not known.serves(with_grad, [self.state[param] for param in with_grad], options):
            check_not_replaced(group["params"], type(self).__name__)
            known = self._plans[index] = self._new_plan(with_grad, options)
            moments.forget(self._layouts, self.state)
        return known

    def _new_plan(self, params: list[Tensor], options: StateOptions) -> Plan:
        layouts = [self._prepare_state(param, options) for param in params]
        return plan(params, [self.state[param] for param in params], layouts, options)

    def _prepare_state(self, param: Tensor, options: StateOptions) -> Layout:
        """Create or convert the state of a parameter if necessary, and return the layout of its moments."""
        kept, owner = self._layouts.get(param), type(self).__name__
        layout = moments.prepare(self.RULE, options, param, self.state[param], kept, owner)
        if not layout == kept:  # noqa: SIM201: Dynamo compares with == alone where a block size is an input of its graph
            self._layouts[param] = layout
        return layout

    @torch.no_grad()
    def float32_values(self, param: Tensor) -> Tensor:
        """Return a copy in float32 of the values of a parameter: with ``master="bf16+8"`` the bfloat16 parameter and
        its correction, otherwise those of the parameter.

        Raises:
            KeyError: the parameter is not one of this optimizer.
        """
        if not any(param is each for group in self.param_groups for each in group["params"]):
            raise KeyError(f"{type(self).__name__}: param must be a parameter of this optimizer")
        kept = self.state.get(param, {}).get(correction.NAME)
        values = sharding.local(param)
        if kept is None or param.dtype != torch.bfloat16:
            return sharding.like(param, values.detach().to(torch.float32, copy=True))
        return sharding.like(param, correction.whole(values, sharding.local(kept)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state like torch's optimizers do, after converting moments to the current memory order of their
        parameters.

        The conversion is needed because 4-bit codes do not contain their order: a loader assumes that of the parameter.

        Raises:
            ValueError: an option of a group has a value that the constructor would reject.
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
        """Load a state dict of this optimizer, or of an optimizer with the same rule in torch, torchao or bitsandbytes.

        Moments are converted to the state format that each parameter has in this optimizer. If the saved format is the
        same, every bit is kept.

        Raises:
            ValueError: the param groups differ, a moment is missing, or the size of one does not fit its parameter.
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
    """Return the seed of stochastic rounding for one call; each call of a step has a different seed."""
    if not group["bf16_stochastic_round"]:
        return None
    call = len(STATE_FORMATS) * index + STATE_FORMATS[lists.state_format]
    return (group["rounding_seed"] + call + (lists.device_index << 32)) & LARGEST_SEED


def _format_of_bits(optim_bits: int) -> str:
    if optim_bits not in BITS:
        raise ValueError(f"Invalid optim_bits value: {optim_bits}, must be 32, 16, 8 or 4")
    return BITS[optim_bits]
