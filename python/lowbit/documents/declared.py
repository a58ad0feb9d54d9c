# SPDX-License-Identifier: Apache-2.0
"""Values of a JSON file as the types that dataclasses declare. A value of another type raises a ValueError that gives
its position in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_WORDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
_NOT_FINITE = ("inf", "-inf", "nan")  # strings, because JSON has no such numbers


def as_declared(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as ``kind``: a dataclass, a list, tuple or dict of such, a plain type, or one of these or None.

    A value that is of one of several declared types is taken as it is. A float may be given as one of the strings "inf",
    "-inf" and "nan".

    Args:
        kind: the declared type.
        value: the value from the JSON file.
        where: the position of the value in the file, for errors.

    Raises:
        ValueError: something is missing, unknown or of another type.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        possible = [part for part in parts if part is not NoneType]
        if type(value) in possible:
            return value
        return as_declared(possible[0] if len(possible) == 1 else NoneType, value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is dict:
        _check(isinstance(value, dict), where, "an object", value)
        return {name: as_declared(parts[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin in (list, tuple):
        return origin(_items(origin, parts, value, where))
    if kind is float and (value in _NOT_FINITE or type(value) is int):
        return float(value)
    _check(type(value) is kind, where, _WORDS[kind], value)
    return value


def _items(origin: Any, parts: tuple[Any, ...], value: Any, where: str) -> list[Any]:
    _check(isinstance(value, (list, tuple)), where, "a list", value)
    if origin is tuple and parts[-1] is not ...:
        _check(len(value) == len(parts), where, f"a list of {len(parts)}", value)
        kinds = parts
    else:
        kinds = parts[:1] * len(value)
    return [as_declared(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))]


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _check(isinstance(value, Mapping), where, "an object", value)
    types, needed = _fields_of(kind)
    for name in needed:
        _check(name in value, where, f"an object with {name}", value)
    for name in value:
        _check(name in types, where, f"an object without {name!r}", value)
    return kind(**{name: as_declared(types[name], item, f"{where}.{name}") for name, item in value.items()})


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the types of a dataclass by field, and the fields without a default."""
    needed = (it.name for it in fields(kind) if it.default is MISSING and it.default_factory is MISSING)
    return get_type_hints(kind), tuple(needed)


def _check(holds: bool, where: str, wanted: str, value: Any) -> None:
    if not holds:
        text = repr(value)
        raise ValueError(f"{where} must be {wanted}, got {text if len(text) <= 80 else text[:77] + '...'}")
