# SPDX-License-Identifier: Apache-2.0
"""Configurations from text: the inverse of ``str(config)``, for command lines, JSON files and checkpoints.

The text is parsed, not evaluated. It must be a call of a known name; its arguments are literals, or one of the few
names that fields of a configuration may have.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any

import torch

from lowbit.formats import FORMATS
from lowbit.formats.algorithms import GPTQ, HQQ, Algorithm
from lowbit.formats.base import GROUP_SIZES, FormatConfig, MappingType, PerAxis, PerGroup, PerRow, PerToken
from lowbit.formats.float import FLOAT_FORMATS
from lowbit.formats.intx import INT_DTYPES
from lowbit.formats.nearest import nearest
from lowbit.formats.spec import LinearSpec
from lowbit.formats.torchao import from_torchao

_OBJECTS = {cls.__name__: cls for cls in (PerAxis, PerGroup, PerRow, PerToken, GPTQ, HQQ)}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(FLOAT_FORMATS),
    "weight_dtype": (*INT_DTYPES, torch.float8_e4m3fn),
    "group_size": (None, *GROUP_SIZES),
    "mapping_type": tuple(MappingType),
    "act_mapping_type": tuple(MappingType),
    "act_granularity": (None, PerRow()),
    "granularity": (PerRow(), *((PerRow(), PerGroup(size)) for size in GROUP_SIZES)),
    "scale": (None, "search", "absmax"),
}
"""The values to try for each argument that a spec depends on."""


def config_of(config: Any) -> FormatConfig:
    """Return the configuration that ``config`` describes.

    Args:
        config: a configuration of lowbit or torchao; the text of a call that creates one, such as
            ``"int4_weight_only(group_size=32)"`` or just ``"int4_weight_only"``; a dict with the name of the function
            as ``"format"`` and its arguments, ``{"format": "int4_weight_only", "group_size": 32}``; or a LinearSpec, or
            a dict of all of its fields.

    Raises:
        TypeError: ``config`` is none of these.
        ValueError: the text is not such a call, or the configuration rejects an argument.

    Example:
        >>> config_of("int4_weight_only(group_size=32)") == lowbit.int4_weight_only(32)
        True
    """
    config = from_torchao(config)
    if isinstance(config, FormatConfig):
        return config
    if isinstance(config, str):
        return _from_call(config)
    if isinstance(config, Mapping) and config.keys() == {field.name for field in fields(LinearSpec)}:
        config = LinearSpec(**{**config, "algorithm": algorithm_from(config["algorithm"])})
    if isinstance(config, LinearSpec):
        return _config_with(config)
    if isinstance(config, Mapping):
        arguments = dict(config)
        name = arguments.pop("format", None)
        if not isinstance(name, str):
            raise ValueError(f'config: "format" must be one of {", ".join(_makers())}, got {name!r}')
        return _make(name, [], {key: _parsed(value) for key, value in arguments.items()}, str(config))
    got = config.__name__ if isinstance(config, type) or callable(config) else type(config).__name__
    raise TypeError(
        f'config must be a configuration, its text such as "int4_weight_only(group_size=32)" or a dict, got {got}'
    )


def algorithm_from(text: Any) -> Algorithm | None:
    """Return the algorithm that ``str`` of it describes, such as "HQQ(iterations=20)"; one or None as it is.

    Raises:
        ValueError: it is none of these.
    """
    algorithm = _parsed(text)
    if not isinstance(algorithm, (GPTQ, HQQ, NoneType)):
        raise ValueError(f"algorithm must be the text of GPTQ() or HQQ(), or null, got {algorithm!r}")
    return algorithm


def _makers() -> dict[str, type[FormatConfig]]:
    return {name: cls for cls in FORMATS for name in (cls.function, cls.__name__)}


def _from_call(text: str) -> FormatConfig:
    node, args, keywords = _expression(text), [], []
    if isinstance(node, ast.Call):
        node, args, keywords = node.func, node.args, node.keywords
    name = ast.unparse(node).removeprefix("lowbit.")
    if any(keyword.arg is None for keyword in keywords):
        raise ValueError(f"config: {text!r} must write out its arguments, got ** of a dict")
    return _make(name, [_value(arg) for arg in args], {word.arg: _value(word.value) for word in keywords}, text)


def _expression(text: str) -> ast.AST:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"config must be a call such as int4_weight_only(group_size=32), got {text!r}") from None


def _make(name: str, args: list[Any], keywords: dict[str, Any], text: str) -> FormatConfig:
    """Call the class if it has a field for every given argument, otherwise the function of the same name."""
    cls = _makers().get(name)
    if cls is None:
        raise ValueError(f"config: {text!r} must begin with one of {', '.join(_makers())}{nearest(name, _makers())}")
    maker: Callable[..., FormatConfig] = cls
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if name == cls.function and (args or not keywords.keys() <= known):
        maker = getattr(sys.modules[cls.__module__], name)
    try:
        inspect.signature(maker).bind(*args, **keywords)
    except TypeError as error:
        known = inspect.signature(maker).parameters
        near = "".join(nearest(word, known) for word in keywords if word not in known)
        raise ValueError(f"config: {text!r}: {name}: {error}{near}") from None
    return maker(*args, **keywords)


def _config_with(spec: LinearSpec) -> FormatConfig:
    """Return the configuration that produces this spec for every weight dtype."""
    choices = {**_CHOICES, "algorithm": dict.fromkeys((None, spec.algorithm))}
    for cls in FORMATS:
        for maker in (getattr(sys.modules[cls.__module__], cls.function), cls):
            names = [name for name in inspect.signature(maker).parameters if name in choices]
            for values in itertools.product(*(choices[name] for name in names)):
                try:
                    config = maker(**dict(zip(names, values, strict=True)))
                except ValueError:  # not every combination is valid
                    continue
                if config.spec(torch.float32) == spec:
                    return config
    raise ValueError(f"config: no configuration has the spec {spec}")


def _value(node: ast.AST) -> Any:
    text = ast.unparse(node)
    owner, _, name = text.rpartition(".")
    if owner == "MappingType" and name in MappingType.__members__:
        return MappingType[name]
    if owner == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _OBJECTS:
        words = {word.arg: _value(word.value) for word in node.keywords if word.arg is not None}
        try:
            return _OBJECTS[ast.unparse(node.func)](*[_value(arg) for arg in node.args], **words)
        except TypeError as error:
            raise ValueError(f"config: {text}: {error}") from None
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"config: {text} must be a literal, MappingType.NAME, torch.dtype or PerGroup(n)") from None


def _parsed(value: Any) -> Any:
    """Return a value of a dict. JSON holds names such as ``torch.int4`` as text; any other string stays a string."""
    names = ("MappingType", "torch", *_OBJECTS)
    if isinstance(value, str) and value.partition("(")[0].partition(".")[0] in names:
        return _value(_expression(value))
    return value
