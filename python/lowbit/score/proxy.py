# SPDX-License-Identifier: Apache-2.0
"""The tensors that a mod gets while it is traced: no data, but a record of what they are made of. The tracer decides
about ops on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.score.program import Value


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The arguments of an op with each leaf changed; in a sixth of the time of torch's own tree_map, which is most
    of a trace."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(change, item) for item in tree])
    if kind is list:
        return [mapped(change, item) for item in tree]
    if kind is dict:
        return {name: mapped(change, item) for name, item in tree.items()}
    return change(tree)


def proxies_of(tree: Any) -> list[Proxy]:
    """The proxies among the arguments of an op."""
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
    """A value that depends on captured tensors alone: the number of the step that makes it."""

    step: int


@dataclass(frozen=True, slots=True)
class Part:
    """A captured tensor with some dimensions fixed: one value per fixed dimension, None for those that are left."""

    tensor: Outside
    indices: tuple[Value | None, ...]


@dataclass(frozen=True, slots=True)
class Inside:
    """Values of the program: an int64 tensor in the shape of the proxy, that holds numbers of values."""

    numbers: Tensor


class Proxy(Tensor):
    """A tensor without data, that knows what it is made of."""

    tracer: Any
    content: Outside | Part | Inside
    meta: Tensor
    argument: bool  # an argument of the mod or a captured tensor: must not be written to

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

    def __repr__(self) -> str:  # printing a mod's values while it is traced
        return f"<{self.dtype} {list(self.shape)} of a score program>"
