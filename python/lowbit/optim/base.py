# SPDX-License-Identifier: Apache-2.0
"""The optimizer that all rules share: state per parameter, param groups, one fused step per group and state format.

The state of a parameter is plain tensors: ``step`` (float32), and per moment its values or codes (``exp_avg``) and, when quantized,
its scales (``exp_avg_scale``). A DTensor's state is DTensors over the same mesh; a step works on the local shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit import devices
from lowbit._C import STATE_FORMATS
from lowbit.ops.optim import StepLists, optim_step
from lowbit.optim import loading, sharding
from lowbit.optim.state_format import BITS, allocate, has_codes, nibble_bytes, scale_count

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_BLOCK, _MAX_BLOCK = 32, 4096
_LARGEST_SEED = 2**63 - 1
_WITHOUT_EFFECT = {
    "args": None, "is_paged": False, "percentile_clipping": 100, "block_wise": True, "foreach": None, "fused": None, "capturable": False,
}  # fmt: skip
"""Arguments of bitsandbytes' and torch's optimizers that mean nothing here, with the value that asks for nothing."""


class LowBitOptimizer(torch.optim.Optimizer):
    """Base of every optimizer of `lowbit.optim`. A subclass names its rule and moments and turns a group into the rule's numbers.

    Each param group holds ``state_format``, ``block_size``, ``min_8bit_size`` and ``bf16_stochastic_round`` beside the rule's own
    options; a group may set them, or ``optim_bits`` (32, 16, 8 or 4), for its parameters alone.
    """

    RULE: ClassVar[str]
    MOMENTS: ClassVar[dict[str, bool]]  # name -> can be negative
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
            "rounding_seed": torch.initial_seed() & _LARGEST_SEED,
        }
        self._check_group(defaults)
        self._plans: dict[int, _Plan] = {}
        super().__init__(params, defaults)

    def _moments(self, group: dict[str, Any]) -> dict[str, bool]:
        """Return the moments that the rule keeps with the group's options: name -> can be negative."""
        return self.MOMENTS

    def _hyper(self, group: dict[str, Any]) -> dict[str, float | bool]:
        """Return the rule's numbers except lr."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for options out of range, in torch's words. A rule with options of its own extends this."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not 0.0 <= lr:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= group["weight_decay"]:
            raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
        for index, beta in enumerate(group.get("betas", ())):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not isinstance(group["min_8bit_size"], int) or group["min_8bit_size"] < 0:
            raise ValueError(f"Invalid min_8bit_size value: {group['min_8bit_size']}")
        if group["state_format"] not in STATE_FORMATS:
            raise ValueError(f"Invalid state_format value: {group['state_format']!r}, must be one of {', '.join(STATE_FORMATS)}")
        block_size = group["block_size"]
        if not isinstance(block_size, int) or not _MIN_BLOCK <= block_size <= _MAX_BLOCK or block_size & (block_size - 1):
            raise ValueError(f"Invalid block_size value: {block_size}, must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, and allocate their state."""
        if "optim_bits" in param_group:
            param_group = dict(param_group)
            param_group["state_format"] = _format_of_bits(param_group.pop("optim_bits"))
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self._check_param(param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        trainable = [param for param in group["params"] if param.requires_grad]
        for param in trainable:
            self._init_state(group, param)
        # 1000 tensors: 7 ms that the first step would take
        self._plans[len(self.param_groups) - 1] = _Plan(self, group, trainable)

    def _check_param(self, param: Tensor) -> None:
        name = type(self).__name__
        devices.check(name, "parameters", param.device)
        if param.dtype not in _PARAM_DTYPES:
            raise ValueError(f"{name}: parameters must be float32, bfloat16 or float16, got {param.dtype}")

    def _format_of(self, group: dict[str, Any], param: Tensor) -> str:
        """Return the format of one parameter's moments: small ones stay float32. A DTensor counts whole, so that ranks agree."""
        state_format = group["state_format"]
        return "float32" if has_codes(state_format) and param.numel() < group["min_8bit_size"] else state_format

    def _init_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        local, state = sharding.local(param), self.state[param]
        state_format = self._format_of(group, param)
        state["step"] = torch.zeros(())
        for name in self._moments(group):
            values, scale = allocate(local, state_format, group["block_size"])
            state.update(self._stored(param, name, values, scale, state_format, group["block_size"]))
        return state

    def _stored(
        self, param: Tensor, name: str, values: Tensor, scale: Tensor | None, state_format: str, block_size: int
    ) -> dict[str, Tensor]:
        """Return one moment of the local shard of ``param`` as entries of its state."""
        nibbles = state_format == "dynamic4"
        stored = {name: sharding.row_like(param, values, nibble_bytes) if nibbles else sharding.like(param, values)}
        if scale is not None:
            stored[f"{name}_scale"] = sharding.row_like(param, scale, lambda numel: scale_count(numel, block_size))
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
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plans = [self._plan(index, group) for index, group in enumerate(self.param_groups)]  # all checks before any change
        for index, (group, plan) in enumerate(zip(self.param_groups, plans, strict=True)):
            for state_format, lists in plan.items():
                optim_step(
                    self.RULE, state_format, group["block_size"], lists, group["lr"],
                    {**self._hyper(group), "weight_decay": group["weight_decay"], "maximize": group["maximize"]},
                    grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None), seed=_seed(group, index, state_format),
                )  # fmt: skip
        return loss

    def _plan(self, index: int, group: dict[str, Any]) -> dict[str, StepLists]:
        """Return the lists of a step by state format. All but the gradients are kept while the same parameters have one."""
        with_grad = [param for param in group["params"] if param.grad is not None]
        if torch.compiler.is_compiling():
            return _Plan(self, group, with_grad).lists()
        plan = self._plans.get(index)
        if plan is None or not plan.serves(group, with_grad):
            plan = self._plans[index] = _Plan(self, group, with_grad)
        return plan.lists()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the same rule in torch, torchao or bitsandbytes, in any of their formats.

        Moments are converted to the format that each parameter has here. A saved state format that is the one wanted is taken
        bit for bit.

        Raises:
            ValueError: other parameter groups, a moment that is missing, or one whose size does not fit its parameter.
        """
        loading.load(self, super().load_state_dict, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


class _Plan:
    """What a step of one group needs, found once: local tensors of parameters and states, by state format."""

    def __init__(self, optimizer: LowBitOptimizer, group: dict[str, Any], params: list[Tensor]) -> None:
        self.optimizer = optimizer
        self.moments = tuple(optimizer._moments(group))
        self.options = self._options(group)
        self.params = params
        self.ids = [id(param) for param in params]
        self.addresses: list[int] = []
        self.kept: list[list[int]] = []  # identities of the state's tensors, per parameter
        self.by_format: dict[str, StepLists] = {}
        self.members: dict[str, list[Tensor]] = {}  # parameters, as the gradients are found on them
        for param in params:
            self._add(group, param)

    def _add(self, group: dict[str, Any], param: Tensor) -> None:
        state = self.optimizer.state[param]
        if not all(name in state for name in ("step", *self.moments)):
            state = self.optimizer._init_state(group, param)
        local = sharding.local(param).detach()
        state_format = self.optimizer._format_of(group, param)
        if state_format not in self.by_format:
            self.by_format[state_format] = StepLists(states=[[] for _ in self.moments])
            self.members[state_format] = []
        lists = self.by_format[state_format]
        if has_codes(state_format) and not lists.scales:
            lists.scales = [[] for _ in self.moments]
        lists.params.append(local)
        lists.steps.append(state["step"])
        for k, name in enumerate(self.moments):
            lists.states[k].append(sharding.local_state(state[name], local, state_format))
            if lists.scales:
                lists.scales[k].append(sharding.local_scale(state[f"{name}_scale"], local, group["block_size"]))
        self.members[state_format].append(param)
        self.kept.append([*map(id, state.values())])
        if not torch.compiler.is_compiling():
            self.addresses.append(local.data_ptr())

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return group["state_format"], group["min_8bit_size"], group["block_size"], tuple(self.optimizer._moments(group))

    def serves(self, group: dict[str, Any], params: list[Tensor]) -> bool:
        """Return whether a step of these parameters may use the lists: nobody swapped a parameter's data or its state."""
        state = self.optimizer.state
        return (
            self.ids == [id(param) for param in params]
            and self.options == self._options(group)
            and self.kept == [[*map(id, state[param].values())] for param in params]
            and self.addresses == [sharding.local(param).data_ptr() for param in params]
        )

    def lists(self) -> dict[str, StepLists]:
        """Return the lists with the gradients of now."""
        for state_format, lists in self.by_format.items():
            lists.grads = [
                _local_grad(param, local) for param, local in zip(self.members[state_format], lists.params, strict=True)
            ]
        return self.by_format


def _local_grad(param: Tensor, local: Tensor) -> Tensor:
    """Return the gradient in the memory order of its (local) parameter; one in another order is replaced, as it may be unscaled in place."""
    if param.grad.is_sparse:
        raise RuntimeError("lowbit.optim does not support sparse gradients")
    grad = sharding.local(param.grad)
    if grad.stride() == local.stride():
        return grad
    ordered = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
    if not sharding.is_dtensor(param):
        param.grad = ordered
    return ordered


def _seed(group: dict[str, Any], index: int, state_format: str) -> int | None:
    """Return the seed of stochastic rounding of one call: no two calls of a step share one."""
    if not group["bf16_stochastic_round"]:
        return None
    return (group["rounding_seed"] + len(STATE_FORMATS) * index + STATE_FORMATS[state_format]) & _LARGEST_SEED


def _format_of_bits(optim_bits: int) -> str:
    if optim_bits not in BITS:
        raise ValueError(f"Invalid optim_bits value: {optim_bits}, must be 32, 16, 8 or 4")
    return BITS[optim_bits]
