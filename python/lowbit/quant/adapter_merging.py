# SPDX-License-Identifier: Apache-2.0
"""Merging adapters of peft over a model with packed layers is all or nothing: a subclass of each tuner class of peft.

An adapter that cannot be merged in one of its layers (numbers that are not finite, a 2:4 weight) leaves every layer,
merged flag and module as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowbit.quant.adapter_layers import class_at, layers_of_adapters, path_of
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.expert_adapters import CHANGING
from lowbit.quant.kinds import is_packed, twin_of
from lowbit.quant.merged_weight import merge_call


@functools.cache
def quant_tuner(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a tuner class of peft, the module that has the adapters of a model; importable by its name,
    so that models pickle."""

    class QuantTuner(cls):  # type: ignore[misc, valid-type]
        def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
            with _all_or_nothing(self.model, "merge_adapter"):
                super().merge_adapter(*args, **kwargs)

        def unmerge_adapter(self, *args: Any, **kwargs: Any) -> None:
            with _all_or_nothing(self.model, "unmerge_adapter"):
                super().unmerge_adapter(*args, **kwargs)

        def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
            with _all_or_nothing(self.model, "merge_and_unload"):
                return super().merge_and_unload(*args, **kwargs)

    QuantTuner.__name__, QuantTuner.__qualname__ = cls.__name__, path_of(cls)
    QuantTuner.__doc__ = cls.__doc__
    return QuantTuner


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module, function: str) -> Iterator[None]:
    layers = dict(layers_of_adapters(model))
    packed = {name: layer.get_base_layer() for name, layer in layers.items() if is_packed(layer.get_base_layer())}
    if not packed:
        yield
        return
    for layer in layers.values():
        layer.__dict__.pop(CHANGING, None)  # of a call of its own that failed
    children = [(module, dict(module._modules)) for module in model.modules()]
    attributes = [(one, one.__dict__ | {"merged_adapters": list(one.merged_adapters)}) for one in layers.values()]
    parameters = [_Held(layer.get_base_layer()) for layer in layers.values()]
    try:
        with changing_layers(model), merge_call(function, model, packed):
            yield
    except BaseException as error:
        broken = next((name for name, layer in layers.items() if CHANGING in layer.__dict__), None)
        for module, held in children:
            module._modules.clear()
            module._modules.update(held)
        for layer, held in attributes:
            layer.__dict__.clear()
            layer.__dict__.update(held)
        for held in parameters:
            held.give_back()
        if broken is not None and isinstance(error, ValueError):
            raise ValueError(f"{function}: {broken} cannot be merged, and nothing was: {error}") from error
        raise


class _Held:
    """What a base holds. A packed layer gets other tensors by a merge, and maybe another format; a float one other
    numbers in the same tensors."""

    def __init__(self, base: nn.Module) -> None:
        self.base, self.twin = base, twin_of(base, type(base))
        copied = not is_packed(base)
        held = [value for value in base._parameters.values() if value is not None]
        self.values = [(value, value.data.clone() if copied else value.data) for value in held]

    def give_back(self) -> None:
        for parameter, values in self.values:
            parameter.data = values
        self.base.__dict__ = self.twin.__dict__


def __getattr__(name: str) -> Any:
    return quant_tuner(class_at(name))
