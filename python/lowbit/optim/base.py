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
from lowbit.optim import loading, sharding
from lowbit.optim.checks import LARGEST_SEED, check_group, check_param
from lowbit.optim.plan import Plan
from lowbit.optim.state_format import BITS, Layout, allocate, decode, encode, has_codes, nibble_bytes, scale_count

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
        self._layouts: dict[Tensor, Layout] = {}  # of the moments in self.state
        super().__init__(params, defaults)

    def _moments(self, group: dict[str, Any]) -> dict[str, bool]:
        """Return the moments that the rule keeps with the group's options: name -> can be negative."""
        moments = OPTIM_RULES[self.RULE]["moments"]
        return {name: is_signed for name, (is_signed, needs) in moments.items() if needs is None or group[needs]}

    def _all_moments(self) -> dict[str, tuple[bool, str | None]]:
        """Return the moments that the rule may keep: name -> can be negative, and the option without which it
        is not kept."""
        return OPTIM_RULES[self.RULE]["moments"]

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
        self._plans[len(self.param_groups) - 1] = Plan(self, group, trainable)

    def _format_of(self, group: dict[str, Any], param: Tensor) -> str:
        """Return the format of one parameter's moments: small ones stay float32. A DTensor counts whole, so
        that ranks agree."""
        state_format = group["state_format"]
        return "float32" if has_codes(state_format) and param.numel() < group["min_8bit_size"] else state_format

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        """Return how the moments of a parameter are to lie in memory."""
        return Layout.of(sharding.local(param), self._format_of(group, param), group["block_size"])

    def _prepare_state(self, group: dict[str, Any], param: Tensor) -> Layout:
        """Make the state of a parameter, or convert it to the parameter's memory order and the group's options as
        they are now."""
        state, layout, moments = self.state[param], self._layout(group, param), self._moments(group)
        kept = self._layouts.get(param, layout) if state else None
        if kept == layout and all(name in state for name in moments):
            return layout
        check_param(param, type(self).__name__)
        if kept is not None and kept.shape != layout.shape:
            if float(state["step"]) > 0:
                raise ValueError(
                    f"{type(self).__name__}: the state of a parameter of shape {list(kept.shape)} does not fit the "
                    "data that it has now, "
                    f"of shape {list(layout.shape)}; delete it from optimizer.state to begin anew"
                )
            kept = None  # zeros, of no use any more
        if kept is None:
            state.clear()
            state["step"] = torch.zeros((), dtype=torch.float32, device=layout.device)
        elif (
            kept != layout
            and has_codes(kept.state_format)
            and has_codes(layout.state_format)
            and float(state["step"]) > 0
        ):
            warnings.warn(f"{type(self).__name__}: moments are encoded again, from {kept} to {layout}", stacklevel=2)
        for name, (is_signed, needs) in self._all_moments().items():
            if name in state and kept not in (None, layout):
                local = sharding.local_moment(state[name], state.pop(f"{name}_scale", None), kept)
                values, scale = encode(decode(*local, kept, is_signed), layout, is_signed)
            elif name in state or name not in moments:
                continue
            elif kept is None or needs is not None:  # one that an option asks for may come later, and begins with zeros
                values, scale = allocate(layout)
            else:
                raise ValueError(f"{type(self).__name__}: the state of a parameter has no {name}, got {sorted(state)}")
            state.update(self._stored(param, name, values, scale, layout))
        self._layouts[param] = layout
        return layout

    def _stored(
        self, param: Tensor, name: str, values: Tensor, scale: Tensor | None, layout: Layout
    ) -> dict[str, Tensor]:
        """Return one moment of the local shard of ``param`` as entries of its state."""
        nibbles = layout.state_format == "dynamic4"
        stored = {name: sharding.row_like(param, values, nibble_bytes) if nibbles else sharding.like(param, values)}
        if scale is not None:
            stored[f"{name}_scale"] = sharding.row_like(
                param, scale, lambda numel: scale_count(numel, layout.block_size)
            )
        return stored

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
            ValueError: an option of a group is not what the constructor would take.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_changed_options()
        plans = [self._plan(index, group) for index, group in enumerate(self.param_groups)]
        for index in range(len(plans), len(self._plans)):  # of groups that were taken away
            self._plans.pop(index, None)
        try:
            take(
                [
                    Step(
                        self.RULE, state_format, group["block_size"], lists, group["lr"],
                        self._hyper(group),
                        getattr(self, "grad_scale", None), getattr(self, "found_inf", None),
                        _seed(group, index, state_format),
                    )
                    for index, (group, plan) in enumerate(zip(self.param_groups, plans, strict=True))
                    for state_format, lists in plan.lists().items()
                ]
            )  # fmt: skip
            for plan in plans:
                plan.finish()
        finally:
            for plan in plans:
                plan.release()
        return loss

    def _check_changed_options(self) -> None:
        """Raise ValueError for an option of a group that was changed to what no step could serve, before anything
        changes. Not for lr, which schedulers may take below 0: `take` has its check."""
        if torch.compiler.is_compiling():
            return
        for index, group in enumerate(self.param_groups):
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if options != self._checked.get(index):
                self._check_group({**options, "lr": 0.0})
                self._checked[index] = options

    def _plan(self, index: int, group: dict[str, Any]) -> Plan:
        """Return the plan of a group's step, the last one while it serves."""
        with_grad = [param for param in group["params"] if param.grad is not None]
        if torch.compiler.is_compiling():
            return Plan(self, group, with_grad)
        plan = self._plans.get(index)
        if plan is None or not plan.serves(group, with_grad):
            plan = self._plans[index] = Plan(self, group, with_grad)
            for forgotten in [param for param in self._layouts if param not in self.state]:
                del self._layouts[forgotten]
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, after converting moments to the memory order that their
        parameters have now.

        4-bit codes do not say their order: a loader reads them in that of the parameter.

        Raises:
            ValueError: an option of a group is not what the constructor would take.
        """
        self._check_changed_options()
        for group in self.param_groups:
            for param in group["params"]:
                kept = self._layouts.get(param) if self.state.get(param) else None
                if kept is not None and kept.shape == sharding.local(param).shape:
                    self._prepare_state(group, param)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the same rule in torch, torchao or bitsandbytes, in any
        of their formats.

        Moments are converted to the format that each parameter has here. A saved state format that is the one wanted is
        taken bit for bit.

        Raises:
            ValueError: other parameter groups, a moment that is missing, or one whose size does not fit its parameter.
        """
        loading.load(self, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layouts": self._layouts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._checked = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _seed(group: dict[str, Any], index: int, state_format: str) -> int | None:
    """Return the seed of stochastic rounding of one call: no two calls of a step share one."""
    if not group["bf16_stochastic_round"]:
        return None
    return (group["rounding_seed"] + len(STATE_FORMATS) * index + STATE_FORMATS[state_format]) & LARGEST_SEED


def _format_of_bits(optim_bits: int) -> str:
    if optim_bits not in BITS:
        raise ValueError(f"Invalid optim_bits value: {optim_bits}, must be 32, 16, 8 or 4")
    return BITS[optim_bits]
