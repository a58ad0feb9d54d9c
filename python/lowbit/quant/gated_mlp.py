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

from lowbit.ops.linear import activation_functions, linear
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, FusedModules, has_own_tensors, hooked, probe_of
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

GATED_LAYERS = ("gate_proj", "up_proj", "down_proj")
_NOT_CALLED = ("gate_proj", "up_proj", "act_fn")
"""Modules whose work a fused MLP does without calling them; hooks of theirs would see nothing."""


class FusedGatedMLP(Fused):
    """The MLP with its activation and product inside the two linear calls; made in place by `fuse_gated_mlps`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training or hooked(self, _NOT_CALLED):  # since it was fused
            return super().forward(x)
        layers, activation = self._modules, self.activation()
        gate, up = layers["gate_proj"], layers["up_proj"]
        if activation is None or type(gate) is not QuantLinear or type(up) is not QuantLinear:  # an adapter, say
            return super().forward(x)
        gated = linear(x, gate.weight, gate.op_args, gate.bias, activation, row=gate.row_number)
        return layers["down_proj"](linear(x, up.weight, up.op_args, up.bias, mul=gated, row=up.row_number))

    def activation(self) -> int | None:
        """The number of ``act_fn``'s activation now, which is found again where the function is another one or was
        changed; None: the op does not have it."""
        function, facts = getattr(self, "act_fn", None), self.facts
        if function is not facts["act_fn"] or type(function) is not facts["kind"] or not facts["noted"].hold(function):
            if is_traced():
                return None
            facts = self.facts = _facts(function)
        return facts["activation"]


@torch.no_grad()
def fuse_gated_mlps(model: nn.Module) -> FusedModules:
    """Fuse each module of ``model`` that is a gated MLP of three `QuantLinear`, in place.

    A module is one when it has ``gate_proj``, ``up_proj``, ``down_proj`` (all quantized) and ``act_fn`` (silu, gelu or
    relu), no other submodule or parameter, and when its own forward gives, on two random float32 rows, the results of
    the fused one: within 1e-2 of the largest value (int8 activations of ``down_proj`` may round to a neighbour).

    A module with hooks on ``gate_proj``, ``up_proj`` or ``act_fn`` is left as it is. One that gets them later calls
    these three as before for as long as it has hooks, and in training mode; another ``act_fn`` counts when it comes.

    Args:
        model: any module. Its names, parameters and state dict stay as they are.

    Returns:
        Names of the modules that were fused, a list; empty where there is none. It prints one line for those of a
        kind; ``left`` has the names of those with hooks.

    Raises:
        ValueError: such a module is on the meta device, where its forward cannot be tried.
    """
    fused = FusedModules()
    for name, module in model.named_modules():
        if isinstance(module, FusedGatedMLP) or not _has_gated_layers(module):
            continue
        facts = _facts(getattr(module, "act_fn", None))
        if facts["activation"] is None:
            continue
        waited_for = hooked(module, _NOT_CALLED)
        if waited_for:
            fused.left[name] = f"hooks on {waited_for}"
            continue
        if module.gate_proj.weight.is_meta:
            raise ValueError(f"fuse_gated_mlps: {name} must have its weights in memory, got the meta device")
        if _fuse(module, facts):
            fused.append(name)
    return fused


def _has_gated_layers(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        not has_own_tensors(module)
        and set(children) <= {*GATED_LAYERS, "act_fn"}
        and all(type(children.get(layer)) is QuantLinear for layer in GATED_LAYERS)
    )


def _facts(function: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
    """The facts of a fused MLP with this ``act_fn``: the number of the activation, and the function and attributes that
    it was found with."""
    activation = _activation(function)
    return {"activation": activation, "act_fn": function, "kind": type(function), "noted": Attributes(function)}


@torch.no_grad()
def _activation(function: Callable[[Tensor], Tensor] | None) -> int | None:
    """The number of the activation that ``function`` computes, found by its values: classes and names
    of them change. One with tensors or modules inside may compute something else at any time."""
    if not callable(function):
        return None
    if isinstance(function, nn.Module) and (has_own_tensors(function) or function._modules):
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


def _fuse(module: nn.Module, facts: dict[str, Any]) -> bool:
    """Fuse the MLP if that changes none of its results."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, module.gate_proj.in_features, dtype=torch.float32, device="cpu", generator=generator)
    probe = probe_of(module)
    wanted = probe(x)
    FusedGatedMLP.take(probe, facts)
    same = bool((probe(x) - wanted).abs().max() <= 1e-2 * wanted.abs().max())
    if same:
        FusedGatedMLP.take(module, facts)
    return same
