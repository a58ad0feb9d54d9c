# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs of decoders (Llama, Mistral, Qwen, Gemma): ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` without a pass
of its own for act_fn and ``*``.

Example:
    >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    >>> lowbit.fuse_gated_mlps(model)
    model.layers.*.mlp x 16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowbit.ops.linear import activation_functions, linear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.tables.folding import LayerNames, told

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_NOT_CALLED = ("gate_proj", "up_proj", "act_fn")
"""Modules whose work a fused MLP does without calling them; hooks of theirs would see nothing."""


class FusedGatedMLP(nn.Module):
    """The MLP with its activation and product inside the two linear calls; made in place by `fuse_gated_mlps`."""

    gate_proj: QuantLinear
    up_proj: QuantLinear
    down_proj: QuantLinear
    activation: int
    unfused: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        if _hooked(self):  # since it was fused
            return self.unfused.forward(self, x)
        gate, up = self.gate_proj, self.up_proj
        gated = linear(x, gate.weight, gate.op_args, gate.bias, self.activation, row=gate.row_number)
        return self.down_proj(linear(x, up.weight, up.op_args, up.bias, mul=gated, row=up.row_number))


class FusedMLPs(LayerNames):
    """Names of the MLPs that were fused; prints one line for those of a kind.

    Attributes:
        left: names of gated MLPs that stay as they are, each with the reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}

    def __repr__(self) -> str:
        reasons = dict.fromkeys(self.left.values())
        left = {reason: told([name for name in self.left if self.left[name] == reason]) for reason in reasons}
        return "\n".join([super().__repr__(), *(f"left: {names}: {reason}" for reason, names in left.items())])


@torch.no_grad()
def fuse_gated_mlps(model: nn.Module) -> FusedMLPs:
    """Fuse each module of ``model`` that is a gated MLP of three `QuantLinear`, in place.

    A module is one when it has ``gate_proj``, ``up_proj``, ``down_proj`` (all quantized) and ``act_fn`` (silu, gelu or
    relu), no other submodule or parameter, and when its own forward gives, on two random float32 rows, what the fused
    one gives: within 1e-2 of the largest value (int8 activations of ``down_proj`` may round to a neighbour).

    A module with hooks on ``gate_proj``, ``up_proj`` or ``act_fn`` is left as it is. One that gets them later calls
    these three as before for as long as it has hooks.

    Args:
        model: any module. Its names, parameters and state dict stay as they are.

    Returns:
        Names of the modules that were fused, a list; empty where there is none. It prints one line for those of a
        kind; ``left`` has the names of those with hooks.

    Raises:
        ValueError: such a module is on the meta device, where its forward cannot be tried.
    """
    fused = FusedMLPs()
    for name, module in model.named_modules():
        activation = _activation(getattr(module, "act_fn", None))
        if isinstance(module, FusedGatedMLP) or activation is None or not _has_gated_layers(module):
            continue
        hooked = _hooked(module)
        if hooked:
            fused.left[name] = f"hooks on {hooked}"
            continue
        if module.gate_proj.weight.is_meta:
            raise ValueError(f"fuse_gated_mlps: {name} must have its weights in memory, got the meta device")
        if _agrees(module, activation):
            # The class is changed in place, as quantize_ does it: other owners of the module, its hooks and its
            # name stay valid.
            module.unfused, module.__class__ = type(module), FusedGatedMLP
            module.activation = activation
            fused.append(name)
    return fused


def unfuse_gated_mlps(model: nn.Module) -> None:
    """Turn every fused MLP of ``model`` back into the class that it was."""
    for module in model.modules():
        if isinstance(module, FusedGatedMLP):
            module.__class__ = module.unfused
            del module.activation, module.unfused


def _has_gated_layers(module: nn.Module) -> bool:
    children = dict(module.named_children())
    own = next(module.parameters(recurse=False), None) is None and next(module.buffers(recurse=False), None) is None
    return (
        own
        and set(children) <= {*_LAYERS, "act_fn"}
        and all(type(children.get(layer)) is QuantLinear for layer in _LAYERS)
    )


def _hooked(module: nn.Module) -> str:
    """The first of the modules that a fused MLP does not call on which something waits for its call; or nothing."""
    if _has_any_global_hook():
        return "all modules"
    for name in _NOT_CALLED:
        layer: Any = getattr(module, name)
        if isinstance(layer, nn.Module) and (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or "forward" in layer.__dict__  # as accelerate hooks a module
        ):
            return name
    return ""


def _activation(function: Callable[[Tensor], Tensor] | None) -> int | None:
    """The number of the activation that ``function`` computes, found by its values: classes and names
    of them change."""
    if not callable(function):
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float32, device="cpu")
    try:
        y = function(x)
    except (TypeError, RuntimeError, ValueError):  # it takes something else than a tensor
        return None
    for number, known in enumerate(activation_functions):
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, known(x), rtol=0, atol=1e-6):
            return number
    return None


def _agrees(module: nn.Module, activation: int) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, module.gate_proj.in_features, dtype=torch.float32, device="cpu", generator=generator)
    fused = FusedGatedMLP()
    for name in (*_LAYERS, "act_fn"):
        setattr(fused, name, getattr(module, name))
    fused.activation = activation
    wanted = module(x)
    return bool((fused(x) - wanted).abs().max() <= 1e-2 * wanted.abs().max())
