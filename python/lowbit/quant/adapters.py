# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft on packed layers: which modules are adapters, and how their layers become those of a packed base
(adapter_layers.py, adapter_merging.py), in models that were packed before peft came or after it."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.quant.adapter_layers import layers_of_adapters, method_of, quant_layer
from lowbit.quant.adapter_merging import quant_tuner
from lowbit.quant.kinds import is_packed, weights_of

NEED_FLOAT = frozenset(("frod", "glora", "ln_tuning", "trainable_tokens"))
"""Methods of peft that no packed layer serves, by their folders; huggingface/peft.py says why."""


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of all modules that are peft adapters, or copies of layers that peft trains."""
    found: set[int] = set()
    for module in model.modules():
        if not any(cls.__module__.startswith("peft.") for cls in type(module).__mro__):
            continue
        for path in getattr(module, "adapter_layer_names", ()):
            child: Any = module
            for name in path.split("."):
                child = getattr(child, name, None)
            if isinstance(child, nn.Module):
                found.update(map(id, child.modules()))
    return found


def adopt_adapters(model: nn.Module) -> None:
    """Bring adapters of peft up to layers that have become packed, or float again, since peft came: its layer for
    floats becomes the one of a packed base, and adapters are told how a Conv1D's weight lies now."""
    for module in model.modules():
        if _is_tuner(module):
            adopt_tuner(module)
    for _, layer in layers_of_adapters(model):
        base = layer.get_base_layer()
        method = method_of(type(layer))
        if is_packed(base) and method not in NEED_FLOAT and quant_layer.__module__ != type(layer).__module__:
            layer.__class__ = quant_layer(type(layer))
        if any(weight.transposed and weight.experts is None for weight in weights_of(base)):
            _set_transposed(layer, base, not is_packed(base))


def adopt_tuner(tuner: nn.Module) -> None:
    """Let the object of peft that has all adapters of a model merge them as a whole."""
    if type(tuner).__module__ != quant_tuner.__module__:
        tuner.__class__ = quant_tuner(type(tuner))


def _is_tuner(module: nn.Module) -> bool:
    return any(
        (cls.__module__, cls.__name__) == ("peft.tuners.tuners_utils", "BaseTuner") for cls in type(module).__mro__
    )


def float_layers(model: nn.Module) -> set[int]:
    """Return the ids of the layers that must stay float for the adapters around them."""
    found = (layer for _, layer in layers_of_adapters(model) if method_of(type(layer)) in NEED_FLOAT)
    return {id(layer.get_base_layer()) for layer in found}


def _set_transposed(layer: nn.Module, base: nn.Module, transposed: bool) -> None:
    """Set ``fan_in_fan_out`` of an adapter layer and its submodules, such as DoRA's: whether the base weight is stored
    as ``[k, n]``."""
    for part in layer.modules():
        if part is not base and hasattr(part, "fan_in_fan_out"):
            part.fan_in_fan_out = transposed
