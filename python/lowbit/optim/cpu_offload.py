# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and steps on the CPU, for parameters on a device.

Each parameter has a copy on the CPU, which the base optimizer updates. A step copies parameters and gradients to the
CPU, takes the base optimizer's step there, and copies the parameters back. Parameters are copied in every step, because
changes in between (a loaded checkpoint, an assignment to `.data`) cannot be detected reliably.
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
_PINS = ("cuda", "xpu")  # devices with asynchronous copies to pinned memory


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose states and steps are on the CPU, while parameters and gradients stay on their device.

    Parameters that are on the CPU already are updated in place without a copy. Param groups, schedulers, clipping,
    GradScaler and gradient accumulation work as usual. The state dict is that of the base optimizer, so it can be
    exchanged with optimizers that are not offloaded.

    Args:
        params: parameters or param groups, on any device. A parameter that is frozen now has no copy; if it is trained
            later, it is updated on its device.
        optimizer_class: a class or function that creates the base optimizer from param groups; of `lowbit.optim`,
            `torch.optim` or your own.
        offload_gradients: whether each gradient is moved to the CPU, and freed on the device, as soon as backward has
            computed it. Then a second backward before the step raises an error, and `clip_grad_norm_` must be called
            with the parameters of ``base_optimizer``.
        minimal_size: parameters with fewer elements are updated on their device, where their states are too.
        options: arguments of ``optimizer_class``, such as lr.

    Raises:
        TypeError, ValueError: an argument is of the wrong type; a parameter is a DTensor on a device (use
            `fully_shard` with CPUOffloadPolicy instead); or ``optimizer_class`` rejects an argument.

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
        """Add a group of parameters with its own options, as torch's optimizers do."""
        super().add_param_group(param_group)
        if self.base_optimizer is None:  # the constructor creates it from all groups later
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
        """Return the tensors that the base optimizer updates: the copy of each parameter, or the parameter itself."""
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
        """Adopt the base optimizer's options and states for added groups, and register hooks for their gradients."""
        self._show()
        for param in (param for group in groups for param in group["params"]):
            self._devices[param] = param.device
            if param in self._copies and self.offload_gradients:
                param.register_post_accumulate_grad_hook(_while_alive(self._offload_gradient))

    def _show(self) -> None:
        """Make the options and states of the base optimizer visible as those of the parameters on the device."""
        assert self.base_optimizer is not None
        for group, stepped in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            options = {name: value for name, value in stepped.items() if name != "params"}
            for name in group.keys() - options.keys() - {"params"}:  # such as optim_bits, which became state_format
                del group[name]
            group.update(options)
        states, params = self.base_optimizer.state, (p for group in self.param_groups for p in group["params"])
        stepped_as = ((param, self._copies.get(param, param)) for param in params)
        self.state.clear()
        self.state.update({param: states[stepped] for param, stepped in stepped_as if stepped in states})

    def _hand_over_options(self) -> None:
        """Pass the current options, which schedulers change, to the base optimizer."""
        assert self.base_optimizer is not None
        for group, stepped in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            stepped.update({name: value for name, value in group.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the CPU. Parameters without a gradient do not change.

        Args:
            closure: reevaluates the model and returns the loss; called with gradients enabled.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ValueError: a parameter was moved to another device after it was added.
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
        """Move a gradient that backward has computed to the CPU."""
        copy = self._copies[param]
        if copy.grad is not None:
            raise RuntimeError(
                f"{_NAME}: offload_gradients=True must have a step() or its zero_grad() between two backward(), got "
                "two gradients of a parameter; accumulate with offload_gradients=False"
            )
        _set_gradient(copy, _to_cpu(param.grad))
        _wait({param.device})  # clipping may read the copy immediately
        param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, including those that were moved to the CPU."""
        super().zero_grad(set_to_none)
        for copy in self._copies.values():
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the base optimizer."""
        assert self.base_optimizer is not None
        self._hand_over_options()
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the base optimizer's class, whether it was offloaded or not.

        Raises:
            ValueError: it is not a state dict of an optimizer, or the base optimizer rejects it.
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
    """Return a hook that calls ``method`` only while the optimizer exists, since a parameter may outlive it."""
    reference = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return hook


def _to_cpu(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor to the CPU, or start the copy. For asynchronous copies torch allocates pinned memory."""
    return None if tensor is None else tensor.detach().to("cpu", non_blocking=tensor.device.type in _PINS)


def _set_gradient(copy: Tensor, gradient: Tensor | None) -> None:
    """Set a gradient, whose dtype may differ from that of the copy."""
    copy.grad = None
    if gradient is not None and gradient.dtype != copy.dtype:
        copy.grad_dtype = gradient.dtype
    copy.grad = gradient


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).synchronize(device)
