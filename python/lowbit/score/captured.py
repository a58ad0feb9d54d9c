# SPDX-License-Identifier: Apache-2.0
"""The objects that a score_mod or mask_mod reads besides its arguments: the cache key of its program, and its tensors.

A new closure per batch is the same mod with other tensors. So the key contains code and constants, but only the dtype
and the number of dimensions of a tensor. The tensors themselves are listed in the order in which they are found, and
passed to the cached program.

If a program depended on more than its key contains, it would be reused for a mod that it does not fit. So there is a
key only if every way in which the code can read an object is detected here:
- code whose opcodes read names, attributes by name, and elements (bytecode.py);
- closure cells, defaults, and the globals that the code names;
- numbers, strings, lists, tuples, dicts; functions of torch and math;
- modules and plain objects: the attributes that any reachable code names are followed, including properties and
  methods.

In three cases the key is None, and the mod is traced at every call: objects that run code of their own when they are
read (`__getitem__`, `__getattr__`, `__len__`, descriptors, caches), functions that can read anything (`getattr`), and
everything outside of Python (files, clocks, environment).
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.score.bytecode import DANGEROUS_ATTRIBUTES, PURE_BUILTIN_VALUES, PURE_BUILTINS, names_of
from lowbit.score.mod import MaskMod, ScoreMod

_CONSTANTS = (int, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, range)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_READERS = frozenset(
    (
        "apply",
        "state_dict",
        *(name for name in vars(nn.Module) if name.startswith(("get_", "named_"))),
        *(
            "parameters",
            "buffers",
            "children",
            "modules",
            "extra_repr",
        ),
    )
)
_NEVER_RUN = frozenset(
    """
    __init__ __new__ __del__ __post_init__ __init_subclass__ __class_getitem__ __set_name__ __setattr__ __delattr__
    __dir__ __sizeof__ __getstate__ __setstate__ __reduce__ __reduce_ex__ __copy__ __deepcopy__ __getnewargs__
    __replace__ __annotate_func__ __annotate__
""".split()
)
"""Methods that run only when an object is created, copied or changed, never when it is read."""


@dataclass(slots=True)
class Captured:
    """The tensors of a mod in a fixed order, and the key of everything else, or None if something cannot be
    compared."""

    tensors: list[Tensor] = field(default_factory=list)
    key: Hashable | None = None

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in self.tensors)


class _Unknown(Exception):
    """Raised for an object that can be read in undetected ways."""


_known_names: dict[
    Any, frozenset[str]
] = {}  # by the code of a mod: the attributes that it, and the code reached from it so far, reads


def captured_by(mod: Callable[..., Any]) -> Captured:
    """List the objects that ``mod`` reads besides its arguments."""
    function = mod.function if type(mod) in (MaskMod, ScoreMod) else mod
    root = getattr(function, "__code__", type(function))
    names = _known_names.get(root, frozenset())
    while True:
        walk = _Walk(names)
        try:
            key: Hashable | None = walk.value(mod)
            hash(key)
        except (_Unknown, TypeError):
            return Captured(walk.tensors)
        if walk.named <= names:
            return Captured(walk.tensors, key)
        names = names | walk.named  # Code found late may name attributes of objects found early.
        if len(_known_names) > 1024:
            _known_names.clear()
        _known_names[root] = names


class _Walk:
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.named: set[str] = set()
        self.tensors: list[Tensor] = []
        self._tensor_numbers: dict[int, int] = {}
        self._visited: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps ids unique

    def value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value)
        if kind in _CONSTANTS:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 and -0.0 are equal, nan and nan are not
        if kind is types.BuiltinFunctionType or kind is types.MethodDescriptorType:
            return self._builtin(value)
        if id(value) in self._visited:
            return "visited", self._visited[id(value)]
        self._visited[id(value)] = len(self._visited)
        self._alive.append(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            return "method", self.value(value.__func__), self.value(value.__self__)
        if kind is functools.partial:
            parts = value.func, value.args, value.keywords
            return "partial", self._all(parts), self._named_in(vars(value))
        if kind is tuple or kind is list:
            return kind, self._all(value)
        if kind is dict:
            return dict, self._all(value.keys()), self._all(value.values())
        if kind is types.ModuleType:
            return self._module(value)
        if kind is types.SimpleNamespace:
            return kind, self.value(vars(value))
        if kind is MaskMod or kind is ScoreMod:
            return kind, self.value(value.function)
        if isinstance(value, type):
            return self._class(value)
        return self._object(value)

    def _tensor(self, tensor: Tensor) -> Hashable:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _Unknown
        number = self._tensor_numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", number, tensor.dtype, tensor.dim(), self._named_in(tensor.__dict__)

    def _all(self, values: Iterable[Any]) -> Hashable:
        return tuple([self.value(value) for value in values])

    def _named_in(self, attributes: Any) -> Hashable:
        return (
            tuple([(name, self.value(attributes[name])) for name in sorted(self.names & attributes.keys())])
            if attributes
            else ()
        )

    def _builtin(self, value: Any) -> Hashable:
        if value in _pure_functions():
            return value
        if type(getattr(value, "__self__", None)) in (list, tuple, dict, str):
            return value.__name__, self.value(value.__self__)
        raise _Unknown

    def _function(self, function: types.FunctionType) -> Hashable:
        if function.__module__ in ("torch.nn.functional", "torch.functional") and not function.__closure__:
            return function
        code = function.__code__
        try:
            cells = self._all(cell.cell_contents for cell in function.__closure__ or ())
        except ValueError:  # not yet assigned
            raise _Unknown from None
        defaults = self._all(function.__defaults__ or ()), self._all(sorted((function.__kwdefaults__ or {}).items()))
        names = names_of(code)
        if names is None:
            raise _Unknown
        self.named |= names.attributes
        if not DANGEROUS_ATTRIBUTES.isdisjoint(names.attributes):
            raise _Unknown
        found = []
        for name in names.globals:
            if name in function.__globals__:
                found.append((name, self.value(function.__globals__[name])))
            elif name not in PURE_BUILTINS:
                raise _Unknown
        return code, cells, defaults, tuple(found), self._named_in(function.__dict__)

    def _module(self, module: types.ModuleType) -> Hashable:
        inside = vars(module)
        if "__getattr__" in inside and module is not torch:
            raise _Unknown
        return module.__name__, self._named_in(inside)

    def _class(self, kind: type) -> Hashable:
        """Return the key of a class used as a value: its attributes are read, and it may be called."""
        if kind in _pure_functions():
            return kind
        if type(kind) is not type or any(
            _is_dunder(name) and callable(item) for name, item in _inherited(kind).items()
        ):
            raise _Unknown
        return kind, self._class_attributes(kind)

    def _object(self, value: Any) -> Hashable:
        kind = type(value)
        if type(kind) is not type:
            raise _Unknown
        attributes = getattr(value, "__dict__", {})
        parts: list[Hashable] = [kind]
        if isinstance(value, nn.Module):
            parts.append(self._parts_of_module(value, attributes))
        if kind in _CONTAINERS:  # their elements are read by position
            return (
                *parts,
                tuple(
                    [(name, self.value(item)) for name, item in attributes.items() if name not in _fields_of_modules()]
                ),
            )
        parts.append(self._protocols(value))
        for name in self.names:
            slot = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
            if type(slot) is types.MemberDescriptorType:
                parts.append((name, self.value(getattr(value, name)) if hasattr(value, name) else None))
        return (*parts, self._named_in(attributes), self._class_attributes(kind))

    def _parts_of_module(self, module: nn.Module, attributes: dict[str, Any]) -> Hashable:
        if any(attributes.get(hooks) for hooks in _HOOKS) or getattr(module, "_compiled_call_impl", None) is not None:
            raise _Unknown
        if any(
            getattr(nn.modules.module, f"_global{hooks}", None) for hooks in _HOOKS
        ) or not _MODULE_READERS.isdisjoint(self.names):
            raise _Unknown
        forward = attributes.get("forward", type(module).forward)
        registered = module._parameters, module._buffers, module._modules
        if type(module) in _CONTAINERS:
            named = tuple([(tuple(items), self._all(items.values())) for items in registered])
        else:
            named = tuple([self._named_in(items) for items in registered])
        return named, self.value(forward) if type(module) not in _CONTAINERS or type(module) is nn.Sequential else None

    def _protocols(self, value: Any) -> Hashable:
        """Return the key of the methods that Python calls implicitly. Those that can return more than an attribute's
        name tells are unknown."""
        kind, found = type(value), []
        fields = getattr(kind, "__dataclass_fields__", {})
        for name, item in sorted(_inherited(kind).items()):
            if not _is_dunder(name) or name in _NEVER_RUN or not callable(item) and not hasattr(item, "__get__"):
                continue
            if name in ("__dict__", "__weakref__") and type(item) is types.GetSetDescriptorType:
                continue
            if type(item) is not types.FunctionType:
                raise _Unknown
            if fields and getattr(item, "__wrapped__", item).__code__.co_filename == "<string>":
                continue  # generated by dataclass from the fields alone: __eq__, __repr__
            if name not in ("__call__", "__repr__", "__str__"):
                raise _Unknown
            found.append((name, self.value(item)))
        return tuple(found), tuple([(name, self.value(getattr(value, name, None))) for name in fields])

    def _class_attributes(self, kind: type) -> Hashable:
        inherited, found = _inherited(kind), []
        for name in sorted(self.names & inherited.keys()):
            item = inherited[name]
            if type(item) is types.MemberDescriptorType:
                continue
            if type(item) is property:
                item = item.fget
            elif type(item) in (staticmethod, classmethod):
                item = item.__func__
            elif type(item) is not types.FunctionType and hasattr(item, "__get__") and not isinstance(item, type):
                raise _Unknown
            found.append((name, self.value(item)))
        return tuple(found)


def _inherited(kind: type) -> dict[str, Any]:
    """Return the attributes of a class and its bases, as an instance finds them."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base is not object and base is not nn.Module:
            found.update(vars(base))
    return found


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@functools.cache
def _pure_functions() -> frozenset[Any]:
    """Return functions that return the same for the same arguments. The tracer detects random numbers itself."""
    homes = [
        torch._C._VariableFunctions,
        torch._C._nn,
        torch._C._special,
        torch._C._linalg,
        torch._C._fft,
        math,
        operator,
    ]
    found = {
        getattr(home, name)
        for home in homes
        for name in dir(home)
        if not name.startswith("__") and name not in ("from_file", "frombuffer")
    }
    found |= {item for item in vars(torch._C.TensorBase).values() if type(item) is types.MethodDescriptorType}
    found = {item for item in found if type(item) in (types.BuiltinFunctionType, types.MethodDescriptorType)}
    return frozenset(
        found
        | PURE_BUILTIN_VALUES
        | {torch.finfo, torch.iinfo, torch.device, torch.dtype, torch.Size, Tensor, nn.Parameter, nn.Module}
    )


@functools.cache
def _fields_of_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))
