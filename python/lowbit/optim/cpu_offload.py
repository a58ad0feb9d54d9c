# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and steps on the CPU, for parameters on a device.

Each parameter has a copy on the CPU, which another optimizer, the base optimizer, steps. A step is: parameters and
gradients to the CPU, the base optimizer's step there, parameters back. Parameters are copied at each step: changes in
between (a checkpoint that is loaded, `.data`) need not leave a trace that could be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.optim import loading, sharding
from lowbit.optim.adamw import AdamW
from lowbit.optim.checks import check_switch

_NAME = "CPUOffloadOptimizer"
_PINS = ("cuda", "xpu")  # devices whose copies to pinned memory need not be waited for


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Keep the states of an optimizer on the CPU and step there; parameters and gradients stay on their device.

    A parameter on the CPU is stepped where it is, without a copy: then this is the base optimizer itself. Param groups,
    schedulers, clipping, GradScaler and gradient accumulation work as ever. A state dict is that of the base optimizer,
    so it also loads into an optimizer that is not offloaded, and the other way.

    Args:
        params: parameters, or param groups, of any device. A frozen parameter has no copy; if it trains later, it is
            stepped on its device.
        optimizer_class: makes the base optimizer of param groups; of `lowbit.optim`, `torch.optim` or yours.
        offload_gradients: move each gradient to the CPU, and free it on the device, as soon as backward has made it.
            A second backward before the step is refused then, and `clip_grad_norm_` has to be given the
            parameters of ``base_optimizer``.
        minimal_size: a parameter of fewer elements is stepped on its device, with its states.
        options: arguments of ``optimizer_class``, such as lr.

    Raises:
        TypeError, ValueError: an argument of another type, a DTensor on a device (`fully_shard` has CPUOffloadPolicy),
            or an argument that ``optimizer_class`` refuses.

    Example:
        >>> optimizer = CPUOffloadOptimizer(model.parameters(), lowbit.optim.AdamW8bit, lr=1e-4)
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer] = AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        check_switch(offload_gradients, "offload_gradients")
        if not isinstance(minimal_size, int) or minimal_size < 0:
            raise ValueError(f"Invalid minimal_size value: {minimal_size!r}, must be a number of elements")
        if not callable(optimizer_class):
            raise TypeError(f"{_NAME}: optimizer_class must be a class of optimizers, got {optimizer_class!r}")
        self.offload_gradients, self.minimal_size = bool(offload_gradients), minimal_size
        self.base_optimizer: torch.optim.Optimizer | None = None
        self._copies: dict[Tensor, Tensor] = {}  # parameter -> its copy on the CPU
        self._devices: dict[Tensor, torch.device] = {}  # the device of each parameter when it was added
        super().__init__(params, {})
        groups = [{**group, "params": self._stepped(group["params"])} for group in self.param_groups]
        self.base_optimizer = optimizer_class(groups, **options)
        self.defaults = self.base_optimizer.defaults
        self._adopt(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as torch's optimizers do."""
        super().add_param_group(param_group)
        if self.base_optimizer is None:  # the constructor makes it of all groups
            return
        group = self.param_groups[-1]
        try:
            self.base_optimizer.add_param_group({**group, "params": self._stepped(group["params"])})
        except BaseException:
            self.param_groups.pop()
            for param in group["params"]:
                self._copies.pop(param, None)
            raise
        self._adopt([group])

    def _stepped(self, params: list[Tensor]) -> list[Tensor]:
        """Return the tensor that the base optimizer steps in the place of each parameter: its copy, or
        the parameter itself."""
        for param in params:
            if param.device.type == "cpu" or not param.requires_grad or param.numel() < self.minimal_size:
                continue
            if sharding.is_dtensor(param):
                raise ValueError(
                    f"{_NAME}: parameters on a device must not be DTensors, got one on {param.device}; "
                    "fully_shard(..., offload_policy=CPUOffloadPolicy()) keeps shards and their states on the CPU"
                )
            self._copies[param] = nn.Parameter(param.detach().to("cpu"))
        return [self._copies.get(param, param) for param in params]

    def _adopt(self, groups: list[dict[str, Any]]) -> None:
        """Take over the base optimizer's groups for those that were added, and watch their gradients."""
        self._show()
        for param in (param for group in groups for param in group["params"]):
            self._devices[param] = param.device
            if param in self._copies and self.offload_gradients:
                param.register_post_accumulate_grad_hook(_while_alive(self._offload_gradient))

    def _show(self) -> None:
        """Show the options and states of the base optimizer as those of the parameters on the device."""
        assert self.base_optimizer is not None
        for group, stepped in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            options = {name: value for name, value in stepped.items() if name != "params"}
            for name in group.keys() - options.keys() - {"params"}:  # such as optim_bits, which is a state_format now
                del group[name]
            group.update(options)
        states, params = self.base_optimizer.state, (p for group in self.param_groups for p in group["params"])
        stepped_as = ((param, self._copies.get(param, param)) for param in params)
        self.state.clear()
        self.state.update({param: states[stepped] for param, stepped in stepped_as if stepped in states})

    def _hand_over_options(self) -> None:
        """Give the base optimizer the options of now, which schedulers change."""
        assert self.base_optimizer is not None
        for group, stepped in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            stepped.update({name: value for name, value in group.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the CPU; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ValueError: a parameter has gone to another device since it was added.
        """
        assert self.base_optimizer is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, device in self._devices.items():
            if param.device != device:
                raise ValueError(
                    f"{_NAME}: parameters must be on the device that they were on when they were added, {device}, "
                    f"got {param.device}; move the model before the optimizer is made"
                )
        self._hand_over_options()
        if not self.offload_gradients:
            for param, copy in self._copies.items():
                _set_gradient(copy, _to_cpu(param.grad))
        stepped = [(param, copy) for param, copy in self._copies.items() if copy.grad is not None]
        for param, copy in stepped:
            copy.data = _to_cpu(param)
        _wait({param.device for param, _ in stepped})
        self.base_optimizer.step()
        for param, copy in stepped:
            param.copy_(copy, non_blocking=True)
            copy.grad = None
        self._show()
        return loss

    @torch.no_grad()
    def _offload_gradient(self, param: Tensor) -> None:
        """Move a gradient that backward has made to the CPU."""
        copy = self._copies[param]
        if copy.grad is not None:
            raise RuntimeError(
                f"{_NAME}: offload_gradients=True must have a step() or its zero_grad() between two backward(), got "
                "two gradients of a parameter; accumulate with offload_gradients=False"
            )
        _set_gradient(copy, _to_cpu(param.grad))
        _wait({param.device})  # clipping may read it at once
        param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those that were moved to the CPU."""
        super().zero_grad(set_to_none)
        for copy in self._copies.values():
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the base optimizer."""
        assert self.base_optimizer is not None
        self._hand_over_options()
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that the base optimizer loads: of its class, offloaded or not.

        Raises:
            ValueError: it is no state dict of an optimizer, or the base optimizer refuses it.
        """
        assert self.base_optimizer is not None
        loading.check_outline(state_dict, f"{_NAME}.load_state_dict")
        self.base_optimizer.load_state_dict(state_dict)
        self._show()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{_NAME}: must not be pickled or copied, as it belongs to the parameters that it was made for; "
            "save its state_dict()"
        )


def _while_alive(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that does nothing once the optimizer is gone: the parameter may have another one then."""
    reference = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return hook


def _to_cpu(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor, or begin to; torch takes pinned memory for a copy that is not waited for."""
    return None if tensor is None else tensor.detach().to("cpu", non_blocking=tensor.device.type in _PINS)


def _set_gradient(copy: Tensor, gradient: Tensor | None) -> None:
    """Set a gradient, of any dtype."""
    copy.grad = None
    if gradient is not None and gradient.dtype != copy.dtype:
        copy.grad_dtype = gradient.dtype
    copy.grad = gradient


def _wait(places: set[torch.device]) -> None:
    for device in places:
        torch.get_device_module(device).synchronize(device)
