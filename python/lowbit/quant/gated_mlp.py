# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs of decoders (Llama, Mistral, Qwen, Gemma): ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, with act_fn
and the product fused into the linear calls.

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
from lowbit.ops.lora_gated_mlp import lora_gated_mlp
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, FusedModules, has_own_tensors, hooked, is_same_in_training, not_packed, probe_of
from lowbit.quant.lora_forward import trained_layers
from lowbit.quant.lora_layers import is_product, plain_children
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

GATED_LAYERS = ("gate_proj", "up_proj", "down_proj")
_NOT_CALLED = ("gate_proj", "up_proj", "act_fn")
"""Children that a fused MLP does not call, so that their hooks would not run."""


class FusedGatedMLP(Fused):
    """A gated MLP whose activation and product are part of two linear calls; `fuse_gated_mlps` turns modules into one
    in place."""

    def forward(self, x: Tensor) -> Tensor:
        if hooked(self, _NOT_CALLED):  # hooks may have been added after fusing
            return super().forward(x)
        layers, activation = self._modules, self.activation()
        gate, up, down = (layers[name] for name in GATED_LAYERS)
        if activation is not None and self.trains_alike() and not hooked(self, GATED_LAYERS[-1:]):
            trained = trained_layers((gate, up), x, down)
            if trained is not None:
                return lora_gated_mlp(x, *trained, activation)
        if (
            self.training or activation is None or type(gate) is not QuantLinear or type(up) is not QuantLinear
        ):  # such as an adapter
            return super().forward(x)
        gated = linear(x, gate.weight, gate.op_args, gate.bias, activation, row=gate.row_number)
        return down(linear(x, up.weight, up.op_args, up.bias, mul=gated, row=up.row_number))

    def trains_alike(self) -> bool:
        """Return whether the module computes in training what it computes otherwise: nothing of it is dropped."""
        return self.facts["trains_alike"] and self.facts["own"].hold(self)

    def activation(self) -> int | None:
        """Return the number of the activation that ``act_fn`` computes, or None if the op does not have it. If the
        function was replaced or changed, it is identified again."""
        function, facts = getattr(self, "act_fn", None), self.facts
        if function is not facts["act_fn"] or type(function) is not facts["kind"] or not facts["noted"].hold(function):
            if is_traced():
                return None
            facts = self.facts = facts | _facts(function)
        return facts["activation"]


@torch.no_grad()
def fuse_gated_mlps(model: nn.Module) -> FusedModules:
    """Fuse every gated MLP of ``model`` that consists of three `QuantLinear`, in place.

    A gated MLP has ``gate_proj``, ``up_proj`` and ``down_proj`` (all quantized, with LoRA of peft or without), ``act_fn`` (silu, gelu or relu), and
    no other submodules or parameters. On two random float32 rows, its forward and the fused one must agree within 1e-2
    of the max value; ``down_proj`` may round an int8 activation to an adjacent code.

    A module with hooks on ``gate_proj``, ``up_proj`` or ``act_fn`` is not fused. A fused module calls all three as
    before while it has such hooks. If its ``act_fn`` is replaced, it uses the new one. With gradients, a fused module
    whose result is the same in training mode is one autograd Function, with LoRA of peft or without.

    Args:
        model: any module. Its names, parameters and state dict stay as they are.

    Returns:
        A list of the names of the fused modules. Printed, it has one line for modules of the same kind. Its attribute
        ``left`` maps the names of the others to the reason why they were left unchanged.

    Raises:
        ValueError: a gated MLP is on the meta device, where its forward cannot be called.

    Example:
        >>> lowbit.fuse_gated_mlps(model)
        model.layers.*.mlp x 16
    """
    fused = FusedModules()
    for name, module in model.named_modules():
        if isinstance(module, FusedGatedMLP) or not module._modules.keys() >= set(GATED_LAYERS):
            continue
        if reason := _differs(module):
            fused.left[name] = reason
            continue
        facts = _facts(getattr(module, "act_fn", None))
        if facts["activation"] is None:
            fused.left[name] = "its act_fn is none of relu, gelu, gelu_tanh and silu"
            continue
        waited_for = hooked(module, _NOT_CALLED)
        if waited_for:
            fused.left[name] = f"hooks on {waited_for}"
            continue
        if module.gate_proj.weight.is_meta:
            raise ValueError(f"fuse_gated_mlps: {name} must have its weights in memory, got the meta device")
        if _fuse(module, facts):
            fused.append(name)
        else:
            fused.left[name] = "its results are not those of down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return fused


def _differs(module: nn.Module) -> str:
    """Say what a module with the three layers has that no gated MLP of ours has, or return an empty string."""
    layers = {layer: module._modules[layer] for layer in GATED_LAYERS}
    for name, layer in layers.items():
        if not is_product(layer):
            return not_packed(name, layer)
    more = [name for name in module._modules if name not in (*GATED_LAYERS, "act_fn")]
    if more or has_own_tensors(module):
        return f"it has more than three linear layers and an activation: {', '.join(more) or 'parameters or buffers'}"
    return ""


def _facts(function: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
    """Return the facts of a fused MLP with this ``act_fn``: the number of the activation, and the function and its
    attributes for which that number holds."""
    activation = _activation(function)
    return {"activation": activation, "act_fn": function, "kind": type(function), "noted": Attributes(function)}


@torch.no_grad()
def _activation(function: Callable[[Tensor], Tensor] | None) -> int | None:
    """Return the number of the activation that ``function`` computes, or None if it is none of the op's.

    It is identified by its values, because class names differ between versions. A function with tensors or submodules
    is rejected, because these may change.
    """
    if not callable(function):
        return None
    if isinstance(function, nn.Module) and (has_own_tensors(function) or function._modules):
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float32, device="cpu")
    try:
        y = function(x)
    except (TypeError, RuntimeError, ValueError):  # the argument is not a single tensor
        return None
    for number, known in enumerate(activation_functions):
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, known(x), rtol=0, atol=1e-6):
            return number
    return None


def _fuse(module: nn.Module, facts: dict[str, Any]) -> bool:
    """Fuse the MLP if that does not change its results; return whether it was fused."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, module.gate_proj.in_features, dtype=torch.float32, device="cpu", generator=generator)
    probe = probe_of(module, **plain_children(module))
    wanted = probe(x)
    facts |= {
        "own": Attributes(module, without=("facts", "training")),
        "trains_alike": is_same_in_training(probe, x, wanted),
    }
    FusedGatedMLP.take(probe, facts)
    same = bool((probe(x) - wanted).abs().max() <= 1e-2 * wanted.abs().max())
    if same:
        FusedGatedMLP.take(module, facts)
    return same
