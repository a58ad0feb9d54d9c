# SPDX-License-Identifier: Apache-2.0
"""What a score_mod or mask_mod reads besides its arguments: the key that its program is kept under, and its tensors.

A new closure per batch is the same mod with other tensors. So the key holds code and constants, and of a tensor only its dtype and
its number of dimensions; the tensors themselves are listed in the order in which they are met, and handed to the kept program.

Followed: closure cells, defaults, `functools.partial`, bound methods, modules and other objects (the attributes that the code
names), globals that the code names. What cannot be looked into makes the key None: that mod is traced at every call.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_CONSTANTS = (int, float, bool, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, enum.Enum)
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, type(len))


@dataclass(slots=True)
class Captured:
    """The tensors of a mod in a fixed order, and the key of everything else (None: there is something that cannot be compared)."""

    tensors: list[Tensor] = field(default_factory=list)
    key: Hashable | None = None

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in self.tensors)


class _Unknown(Exception):
    """Met something whose state cannot be compared."""


def captured_by(mod: Callable[..., Any]) -> Captured:
    """List what ``mod`` reads besides its arguments."""
    walk = _Walk()
    try:
        key: Hashable | None = walk.value(mod, frozenset())
        hash(key)
    except (_Unknown, TypeError):
        key = None
    return Captured(walk.tensors, key)


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._tensor_numbers: dict[int, int] = {}
        self._visited: dict[tuple[int, frozenset[str]], int] = {}

    def value(self, value: Any, names: frozenset[str]) -> Hashable:
        """The key of a value, of whose attributes only ``names`` can be read."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _CONSTANTS):
            return type(value), value
        if isinstance(value, _BUILTINS):
            return value
        visit = id(value), names
        if visit in self._visited:
            return "visited", self._visited[visit]
        self._visited[visit] = len(self._visited)
        if isinstance(value, types.FunctionType):
            return self._function(value, names)
        if isinstance(value, types.MethodType):
            inside = names | _names(value.__func__.__code__) if isinstance(value.__func__, types.FunctionType) else names
            return "method", self.value(value.__func__, names), self.value(value.__self__, inside)
        if isinstance(value, functools.partial):
            return "partial", self.value(value.func, names), self._all(value.args, names), self._all(sorted(value.keywords.items()), names)
        if isinstance(value, (tuple, list)):
            return type(value), self._all(value, names)
        if isinstance(value, dict):
            return dict, self._all(value.items(), names)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__, () if _is_known(value.__name__) else self._attributes(vars(value), names)
        if isinstance(value, type):
            return value if _is_known(value.__module__) else (value, self._attributes(vars(value), names))
        return self._object(value, names)

    def _tensor(self, tensor: Tensor) -> Hashable:
        number = self._tensor_numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, tensor.dtype, tensor.dim()

    def _all(self, values: Iterable[Any], names: frozenset[str]) -> Hashable:
        return tuple(self.value(value, names) for value in values)

    def _function(self, function: types.FunctionType, names: frozenset[str]) -> Hashable:
        if _is_known(function.__module__) and not function.__closure__:
            return function
        code = function.__code__
        names = names | _names(code)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents, names))
            except ValueError:  # not yet assigned
                raise _Unknown from None
        values = self._all(function.__defaults__ or (), names), self._all(sorted((function.__kwdefaults__ or {}).items()), names)
        return code, tuple(cells), values, () if _is_known(function.__module__) else self._attributes(function.__globals__, names)

    def _object(self, value: Any, names: frozenset[str]) -> Hashable:
        kind = type(value)
        call = kind.forward if isinstance(value, nn.Module) else getattr(kind, "__call__", None)
        parts: list[Hashable] = [kind]
        if isinstance(call, types.FunctionType):
            names = names | _names(call.__code__)
            parts.append(self.value(call, names))
        attributes = dict(getattr(value, "__dict__", {}))
        for slot in (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)):
            attributes[slot] = getattr(value, slot)
        if isinstance(value, nn.Module):
            attributes |= {**value._parameters, **value._buffers, **value._modules}
        elif not attributes and not isinstance(call, types.FunctionType):
            raise _Unknown  # written in C, or without state that can be seen
        inherited = {name: item for base in reversed(kind.__mro__) for name, item in vars(base).items() if not _is_known(base.__module__)}
        methods = {name: _function_of(item) for name, item in inherited.items()}
        while more := frozenset().union(*(_names(item.__code__) for name, item in methods.items() if item and name in names)) - names:
            names = names | more  # a method that the mod calls reads the same object
        return *parts, self._attributes({**inherited, **attributes}, names)

    def _attributes(self, attributes: Any, names: frozenset[str]) -> Hashable:
        found = []
        for name in sorted(names):
            if name in attributes:
                found.append((name, self.value(_function_of(attributes[name]) or attributes[name], names)))
        return tuple(found)


def _function_of(item: Any) -> types.FunctionType | None:
    """The Python function that a class attribute runs."""
    item = item.fget if isinstance(item, property) else item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
    return item if isinstance(item, types.FunctionType) else None


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """Every name that the code can read from globals or as an attribute, also by `getattr` with a literal, also in inner functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


def _is_known(module: str | None) -> bool:
    """A module whose functions keep no state that a mod reads."""
    return (module or "").partition(".")[0] in ("torch", "math", "operator", "builtins", "functools", "numpy")
