# SPDX-License-Identifier: Apache-2.0
"""Adapter layers of peft over packed ones: a subclass of each layer class of peft, made when it is first needed.

peft's own code does the work, on a copy of the adapter layer (the same parameters, other attributes) over another base:

- merge and unmerge: over a float layer with the decoded weight. What has come of the weight is packed (merging.py), and
  only when all of it has succeeded the adapter layer and its base change. A weight that comes back as it was keeps its
  bytes.
  Unmerging brings back the bytes from before the merge. A weight that was loaded in between counts as merged, as peft
  treats float layers: unmerging takes the adapter off it.
- forward and other functions that read the weight: over the packed layer, which lends it (lent_weight.py) for the time
  of the call, in the dtype of the input.
"""

from __future__ import annotations

import copy
import functools
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.expert_adapters import CHANGING, ExpertsAdapter
from lowbit.quant.kinds import is_packed, kind_of, twin_of, weights_of
from lowbit.quant.lent_weight import lent
from lowbit.quant.lora_forward import forward_of
from lowbit.quant.merged_weight import merged_weight
from lowbit.quant.safetensors_file import bytes_of

_READING: dict[str, tuple[str, ...]] = {
    "adamss": ("get_delta_weight", "get_delta_bias"),
    "c3a": ("get_delta_weight",),
    "deft": ("get_delta_weight",),
    "hira": ("forward",),
    "hra": ("forward",),
    "loha": ("get_delta_weight",),
    "lora": ("get_delta_weight",),
    "lokr": ("get_delta_weight",),
    "peanut": ("get_delta_weight",),
    "psoft": ("get_delta_weight",),
    "shira": ("forward",),
    "supertuning": ("forward", "get_delta_weight"),
    "unilora": ("update_scaling",),
}
"""Functions of adapter layers that read the weight of the base, its shape or its dtype, beside those that merge; by the
folders of peft."""


def method_of(cls: type) -> str:
    """Return the folder of peft that a class of adapter layers is from: the method's name in lower case."""
    homes = (base.__module__.split(".") for base in cls.__mro__ if base.__module__.startswith("peft.tuners."))
    return next((home[2] for home in homes if len(home) > 3), "")


def layers_of_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of peft that have another one below them, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer") and "base_layer" in module._modules and method_of(type(module)):
            yield name, module


@functools.cache
def quant_layer(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a layer class of peft for a packed base; importable by its name, so that models pickle."""
    if hasattr(cls, "get_param"):  # around a parameter of a module; peft knows such layers by the name of their class
        made = type(cls.__name__, (ExpertsAdapter, cls), {"__module__": __name__})
    else:
        made = _around_layer(cls)
        made.__name__ = f"Quant{method_of(cls).title()}{cls.__name__}"
    made.__qualname__ = path_of(cls)
    made.__doc__ = f"{cls.__name__} of {cls.__module__} over a packed layer."
    return made


def _around_layer(cls: type[nn.Module]) -> type[nn.Module]:
    class QuantLayer(cls):  # type: ignore[misc, valid-type]
        forward = forward_of(cls)

        def merge(self, *args: Any, **kwargs: Any) -> None:
            base = self.get_base_layer()
            if not is_packed(base):
                return super().merge(*args, **kwargs)
            self.__dict__[CHANGING] = True
            changed = _run_on_float(self, base, cls.merge, args, kwargs)
            if changed.merged_adapters != self.merged_adapters:
                _commit_merge(changed, self.__dict__.get("before_merge") if self.merged else _Stored(base))
            del self.__dict__[CHANGING]

        def unmerge(self, *args: Any, **kwargs: Any) -> None:
            base = self.get_base_layer()
            if not is_packed(base) or not self.merged:
                return super().unmerge(*args, **kwargs)
            before = self.__dict__.get("before_merge")
            changed = _run_on_float(self, base, cls.unmerge, args, kwargs)
            if changed.merged_adapters:  # some stay
                _commit_merge(changed, before)
            else:
                changed.commit(before)
                self.__dict__.pop("before_merge", None)

    for name in _READING.get(method_of(cls), ()):
        setattr(QuantLayer, name, _reading(cls, name))
    return QuantLayer


def _commit_merge(changed: _Changed, before: _Stored | None) -> None:
    """Commit a change after which adapters are merged, and keep what was there before the first of them."""
    if before is not None and before.merged != (0, 0) and before.merged != _checksums(changed.base):
        before = None  # another weight was loaded, which counts as merged
    changed.commit()
    if before is not None:
        before = copy.copy(before)  # a merge that is undone has the one from before
        before.note(changed.base)
    changed.layer.__dict__["before_merge"] = before


def _reading(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the function of peft's class, run over a base that lends its weight in the dtype of the input."""
    function = getattr(cls, name)

    @functools.wraps(function)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_layer()
        # What is merged or disabled is the base's own call, and may unmerge before it: not on a copy.
        if not is_packed(base) or (name == "forward" and (self.disable_adapters or self.merged)):
            return function(self, *args, **kwargs)
        floats = (x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point())
        return function(_over(self, lent(base, next(floats, torch.float32))), *args, **kwargs)

    return reading


def _over(layer: nn.Module, base: nn.Module) -> Any:
    """Return a copy of an adapter layer over another base; what it assigns to itself stays its own."""
    inner = layer._modules["base_layer"]
    if hasattr(inner, "base_layer"):  # peft's mixed models put one method over another
        base = _over(inner, base)
    cls = _copied_class(type(layer))
    twin = cls.__new__(cls)
    twin.__dict__ = layer.__dict__ | {"_modules": layer._modules | {"base_layer": base}}
    twin.__dict__["merged_adapters"] = list(layer.merged_adapters)
    return twin


@functools.cache
def _copied_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of peft; its objects take nothing down with them: OSF's remove hooks from parameters."""
    cls = cls.__mro__[1] if cls.__module__ == __name__ else cls
    return type(cls.__name__, (cls,), {"__del__": lambda self: None}) if hasattr(cls, "__del__") else cls


class _Stored:
    """The packed weight and the bias that a merge replaced, and checksums of those that it put there: also in copies of
    the layer they tell whether others were loaded since."""

    def __init__(self, base: Any) -> None:
        self.weight, self.bias = _held(base)
        self.spec = base.spec
        self.bias = None if self.bias is None else self.bias.detach().clone()
        self.merged = (0, 0)

    def note(self, base: Any) -> None:
        """Note what the base holds now, after a merge."""
        self.merged = _checksums(base)


class _Changed:
    """What has come of an adapter layer and its base, before either of them is changed."""

    def __init__(self, layer: Any, base: Any, twin: Any, dense: nn.Module) -> None:
        self.layer, self.base, self.twin, self.dense = layer, base, twin, dense
        self.merged_adapters: list[str] = twin.merged_adapters

    @torch.no_grad()
    def commit(self, before: _Stored | None = None) -> None:
        """Change them. ``before``: what a merge replaced, which comes back where nothing else was loaded since."""
        base, (weight, bias) = self.base, _held(self.dense)
        now = _checksums(base) if before is not None else (0, 0)
        if before is not None and before.merged[0] == now[0]:
            weight, spec = before.weight, before.spec
        else:
            weight, spec = merged_weight(base, weight)
        bias = before.bias if before is not None and before.merged[1] == now[1] else bias
        (names,) = weights_of(base)
        if spec == base.spec:
            base._parameters[names.key] = weight
        else:
            kind_of(base).hold(base, names.key, weight, names.stored(spec, kind_of(base).layout_of(base)))
        if bias is not None:
            held = base._parameters[names.bias]
            if held is None:
                base._parameters[names.bias] = nn.Parameter(bias.detach().clone(), requires_grad=False)
            elif not torch.equal(held.data, bias.to(held.dtype)):
                held.data = bias.detach().to(held.dtype, copy=True)
        elif names.bias is not None:
            base._parameters[names.bias] = None
        self.layer.__dict__.update({key: value for key, value in self.twin.__dict__.items() if key != "_modules"})


@torch.no_grad()
def _run_on_float(
    layer: Any, base: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Changed:
    """Run peft's method on a copy of the adapter layer over the decoded base."""
    dense = twin_of(base, nn.Linear if kind_of(base).multiplies else nn.Embedding)
    (names,) = weights_of(base)
    dense._parameters[names.key] = nn.Parameter(base.dequantize(), requires_grad=False)
    if (bias := _held(base)[1]) is not None:
        dense._parameters[names.bias] = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
    twin = _over(layer, dense)
    method(twin, *args, **kwargs)
    return _Changed(layer, base, twin, dense)


def _held(layer: Any) -> tuple[Any, Any]:
    """Return the parameters of a layer of one weight, float or packed: the weight and the bias."""
    (names,) = weights_of(layer)
    return layer._parameters[names.key], layer._parameters.get(names.bias)


def _checksums(base: Any) -> tuple[int, ...]:
    values = (None if value is None or value.is_meta else value.detach().cpu().contiguous() for value in _held(base))
    return tuple(0 if value is None else zlib.crc32(bytes_of(value)) for value in values)


def path_of(cls: type) -> str:
    """Return where a class is, as a name without dots: that of the subclass that is made of it."""
    return f"{cls.__module__}:{cls.__qualname__}".replace(".", "/")


def class_at(path: str) -> Any:
    """Return the class that is at a path of `path_of`."""
    module, separator, cls = path.replace("/", ".").partition(":")
    if not separator:
        raise AttributeError(f"there is no {path!r} here")
    return functools.reduce(getattr, cls.split("."), importlib.import_module(module))


def __getattr__(name: str) -> Any:
    return quant_layer(class_at(name))
