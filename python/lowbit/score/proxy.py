# SPDX-License-Identifier: Apache-2.0
"""The tensors that a mod gets while it is traced: they have no data, but record how they are computed. The tracer
handles ops on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.score.program import Value


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the arguments of an op with each leaf changed. It is much faster than torch's tree_map, which would take
    most of the time of a trace."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(change, item) for item in tree])
    if kind is list:
        return [mapped(change, item) for item in tree]
    if kind is dict:
        return {name: mapped(change, item) for name, item in tree.items()}
    return change(tree)


def proxies_of(tree: Any) -> list[Proxy]:
    """Return the proxies among the arguments of an op."""
    kind = type(tree)
    if kind is Proxy:
        return [tree]
    if kind is dict:
        tree = tree.values()
    elif kind is not tuple and kind is not list:
        return []
    return [found for item in tree for found in proxies_of(item)]


class RandomOp(Exception):
    """The mod draws random numbers."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A value that depends only on captured tensors: the number of the step that computes it."""

    step: int


@dataclass(frozen=True, slots=True)
class Part:
    """A captured tensor with some dimensions fixed: one value per fixed dimension, None for each remaining one."""

    tensor: Outside
    indices: tuple[Value | None, ...]


@dataclass(frozen=True, slots=True)
class Inside:
    """Values of the program: an int64 tensor in the shape of the proxy, with the number of the value of each
    element."""

    numbers: Tensor


class Proxy(Tensor):
    """A tensor without data, which records how it is computed."""

    tracer: Any
    content: Outside | Part | Inside
    meta: Tensor
    argument: bool  # an argument of the mod or a captured tensor, which must not be written to

    @staticmethod
    def __new__(cls, tracer: Any, content: Outside | Part | Inside, meta: Tensor, argument: bool = False) -> Proxy:
        made = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device="cpu")
        made.tracer, made.content, made.meta, made.argument = tracer, content, meta, argument
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer = proxies_of((args, kwargs))[0].tracer
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomOp(func.__name__)
        name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
        if func._schema.is_mutable:
            return tracer.write(name, args, kwargs or {})
        return tracer.dispatch(name, func, args, kwargs or {})

    def __repr__(self) -> str:  # for mods that print values while they are traced
        return f"<{self.dtype} {list(self.shape)} of a score program>"
