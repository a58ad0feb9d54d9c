# SPDX-License-Identifier: Apache-2.0
"""LoRA of peft over packed linear layers, as fused modules see it.

    y = W x + b + sum over the active adapters of scaling * B (A x)

peft's layer stays where it is. `base_of` returns the packed layer below it, `factors_of` the A and B that it adds now,
`why_not` why it now computes something else; then its own code runs.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.fused import has_hooks
from lowbit.quant.typed_linear import PRODUCTS
from lowbit.quant.unchanged import Unchanged

_NAMES = ("_active_adapter", "merged_adapters")
_READ = ("_disable_adapters", "lora_variant", "scaling")
"""Attributes that peft's forward reads: names of adapters, and others."""
_PARTS = ("lora_dropout", "lora_A", "lora_B")
"""The modules of an adapter, in dictionaries by its name."""


def base_of(layer: Any) -> Any:
    """Return the packed layer below a LoRA layer of peft, or the layer itself."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    forward = getattr(type(layer), "forward", None)
    if peft is None or getattr(forward, "__wrapped__", forward) is not peft.Linear.forward:  # lora_forward.py wraps it
        return layer
    base = layer._modules.get("base_layer")
    return base if type(base) in PRODUCTS else layer


def is_product(layer: Any) -> bool:
    """Whether the layer is a `QuantLinear`, or LoRA over one."""
    return type(base_of(layer)) in PRODUCTS


def is_step(layer: Any) -> bool:
    """Whether the layer is a `QuantLinear`, or LoRA over one that now adds nothing but products of A and B."""
    return is_product(layer) and not why_not(layer)


def plain_children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the packed layers below the children that are LoRA, by the names of these."""
    bases = ((name, child, base_of(child)) for name, child in module._modules.items())
    return {name: base for name, child, base in bases if base is not child}


def why_not(layer: Any) -> str:
    """Say why this layer, for which `is_product` holds, cannot be a step of a program now, or return an empty string."""
    if type(layer) in PRODUCTS:
        return ""
    if has_hooks(base_of(layer)):
        return "its base layer has hooks"
    if layer.merged or layer.disable_adapters:
        return "its adapter is merged and disabled" if layer.merged and layer.disable_adapters else ""
    return next(filter(None, (_why_not(layer, name) for name in _active(layer))), "")


def _why_not(layer: Any, name: str) -> str:
    if name in layer.lora_variant:
        return f"its adapter {name!r} is {type(layer.lora_variant[name]).__name__}, more than A and B"
    dropout, down, up = parts = [getattr(layer, part)[name] for part in _PARTS]
    if any(map(has_hooks, parts)):
        return f"its adapter {name!r} has hooks"
    if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or dropout.training):
        return f"its adapter {name!r} has dropout, and is in training"
    if any(type(part) is not nn.Linear or part.bias is not None for part in (down, up)):
        return f"its adapter {name!r} is no pair of linear layers without bias"
    base, rank = base_of(layer), len(down.weight)
    if down.weight.shape != (rank, base.in_features) or up.weight.shape != (base.out_features, rank):
        return f"its adapter {name!r} is not of the size of the layer"
    if any(part.weight.dtype not in FLOATS or not part.weight.is_cpu for part in (down, up)):
        return f"its adapter {name!r} is not of float32, bfloat16 or float16 on the CPU"
    return ""


def _active(layer: Any) -> list[str]:
    """Return the names of the adapters that the layer adds, if it adds any."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def factors_of(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Return A ``[r, k]``, B ``[n, r]`` and the scaling of each adapter that a layer adds for which `is_step` holds."""
    if type(layer) in PRODUCTS or layer.merged or layer.disable_adapters:
        return []
    return [(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in _active(layer)]


def note_lora(unchanged: Unchanged, layer: Any) -> None:
    """Record all that `why_not` and `factors_of` read of a layer."""
    if type(layer) in PRODUCTS:
        return
    unchanged.note(layer.__dict__, *_READ)
    unchanged.note(layer._modules, "base_layer", *_PARTS)
    unchanged.note_module(layer)
    unchanged.note_equal(layer.__dict__, *_NAMES)
    for name in layer.active_adapters:
        unchanged.note_equal(layer.scaling, name)
        unchanged.note(layer.lora_variant, name)
        for part in _PARTS:
            unchanged.note(layer._modules[part]._modules, name)
    for name in _active(layer):
        for part in (layer._modules[part]._modules[name] for part in _PARTS):
            unchanged.note_module(part)
            unchanged.note(part.__dict__, "training")
            unchanged.note(part._parameters, *part._parameters)
            for factor in part.parameters():
                unchanged.note_contents(factor)
