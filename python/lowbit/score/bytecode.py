# SPDX-License-Identifier: Apache-2.0
"""The names that Python bytecode can read: globals, and attributes of any object it gets."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from dataclasses import dataclass

PURE_BUILTINS = frozenset(
    """
    abs all any bool bytes complex dict divmod enumerate filter float int isinstance len list map max min pow print
    range reversed round slice sorted str sum tuple zip Ellipsis NotImplemented True False None AssertionError Exception
    IndexError KeyError NotImplementedError RuntimeError TypeError ValueError
""".split()
)
"""Builtins that read nothing but the elements of their arguments. `getattr`, `vars`, `type`, `open` and the like are
not among them."""

PURE_BUILTIN_VALUES = frozenset(getattr(builtins, name) for name in PURE_BUILTINS if callable(getattr(builtins, name)))

DANGEROUS_ATTRIBUTES = frozenset(("format", "format_map"))
"""Attributes through which a string reads other attributes."""

_REFUSED = (
    "STORE_GLOBAL",
    "DELETE_",
    "STORE_ATTR",
    "STORE_SUBSCR",
    "STORE_SLICE",
    "IMPORT_",
    "LOAD_BUILD_CLASS",
    "LOAD_SUPER_",
    "STORE_NAME",
    "SEND",
)
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True, slots=True)
class Names:
    """Globals in a fixed order, and attributes."""

    globals: tuple[str, ...]
    attributes: frozenset[str]


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> Names | None:
    """Return the names in the code and in the functions inside it, or None if it changes outside objects, imports, or
    reads in ways that have no name."""
    found_globals: set[str] = set()
    attributes: set[str] = set()
    for inner in _with_inner(code):
        for instruction in dis.get_instructions(inner):
            name = instruction.opname
            if name.startswith(_REFUSED) and name != "DELETE_FAST":
                return None
            if name == "STORE_DEREF" and instruction.argval in code.co_freevars:
                return None
            if name in _GLOBALS:
                found_globals.add(instruction.argval)
            elif name in _ATTRIBUTES:
                attributes.add(instruction.argval)
    if any(name.startswith("__") and name.endswith("__") for name in attributes):
        return None
    return Names(tuple(sorted(found_globals)), frozenset(attributes))


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _with_inner(constant)
    return found
