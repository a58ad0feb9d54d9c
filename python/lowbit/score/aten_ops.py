# SPDX-License-Identifier: Apache-2.0
"""The score-program instructions of each ATen op: the pointwise ones from aten_pointwise.py, and here those that read,
create or reduce tensors.

FUNCTIONS maps the functions that a mod calls from Python to ATen ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.score.aten_pointwise import POINTWISE, common, each, kind, rounded
from lowbit.score.program import UnknownOp, Value
from lowbit.score.proxy import Inside, Part, Proxy

VIEWS = frozenset((
    "select", "slice", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "unbind", "split",
    "split_with_sizes", "cat", "stack", "diagonal", "flip", "repeat",
))  # fmt: skip
"""Ops that move elements and compute nothing. They are applied to the indices of the values."""


def _index(tracer: Any, tensor: Any, indices: list[Any]) -> Any:
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise UnknownOp("an index that is a mask")
    if isinstance(tensor, Proxy):
        if isinstance(tensor.content, Inside):
            raise UnknownOp("an index into values of the program")
        part = tensor.content if isinstance(tensor.content, Part) else Part(tensor.content, (None,) * tensor.dim())
    else:
        part = Part(tracer.constant(tensor), (None,) * tensor.dim())
    free = [position for position, value in enumerate(part.indices) if value is None]
    given = {free[place]: index for place, index in enumerate(indices) if index is not None}
    p = tracer.program

    def fixed(values: tuple[Value, ...]) -> Part:
        found = dict(zip(given, (p.convert(value, "int") for value in values), strict=True))
        return Part(part.tensor, tuple(found.get(position, value) for position, value in enumerate(part.indices)))

    numbers = torch.broadcast_tensors(*map(tracer.numbers, given.values()))
    left = [size for place, size in enumerate(tensor.shape) if free[place] not in given]
    meta = torch.empty((), dtype=tensor.dtype, device="cpu").expand([*numbers[0].shape, *left])
    if numbers[0].dim() == 0:
        return tracer.part(fixed(tuple(value for item in numbers for value in tracer.values(item))), meta)
    if len(given) < len(free):
        raise UnknownOp("a slice beside an index of several elements")
    rows = zip(*(tracer.values(item) for item in numbers), strict=True)
    return tracer.inside([tracer.gather(fixed(row), ()) for row in rows], meta)


def _embedding(tracer: Any, meta: Tensor, weight: Any, indices: Any, *_: Any) -> Any:
    return _index(tracer, weight, [indices])


def _index_select(tracer: Any, meta: Tensor, tensor: Any, dim: int, index: Any) -> Any:
    if index.dim():
        raise UnknownOp("aten.index_select by several elements")
    dim %= tensor.dim()
    return tracer.view("unsqueeze", tracer.view("index", tensor, [None] * dim + [index]), dim)


def _ones(tracer: Any, meta: Tensor, *_: Any, **__: Any) -> Any:
    return each(tracer, meta, lambda x: x, 1)


def _zeros(tracer: Any, meta: Tensor, *_: Any, **__: Any) -> Any:
    return each(tracer, meta, lambda x: x, 0)


def _full_like(tracer: Any, meta: Tensor, _: Any, value: Any, **__: Any) -> Any:
    return each(tracer, meta, lambda x: x, value)


def _new_full(tracer: Any, meta: Tensor, _: Any, __: Any, value: Any, **___: Any) -> Any:
    return each(tracer, meta, lambda x: x, value)


def _scalar_tensor(tracer: Any, meta: Tensor, value: Any, **_: Any) -> Any:
    return each(tracer, meta, lambda x: x, value)


def _dot(tracer: Any, meta: Tensor, a: Any, b: Any) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    columns = [[p.convert(value, type) for value in tracer.values(tracer.numbers(operand))] for operand in (a, b)]
    products = [p.op("mul", x, y) for x, y in zip(*columns, strict=True)]
    return tracer.inside([rounded(p, _reduced(p, "add", products, p.convert(p.constant(0), type)), meta.dtype)], meta)


def _reduced(program: Any, instruction: str, values: list[Value], empty: Value) -> Value:
    return functools.reduce(lambda x, y: program.op(instruction, x, y), values) if values else empty


def _reduction(name: str, instruction: str, type: str | None, empty: float | bool | None) -> Callable[..., Any]:
    """Register a reduction of rows of elements by one instruction, in the type given (None for that of the result).
    ``empty`` is the result for no elements."""

    def handler(tracer: Any, meta: Tensor, a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        p, wanted = tracer.program, type or kind(meta.dtype)
        numbers = tracer.numbers(a)
        dims = list(range(numbers.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
        dims = [d % max(numbers.dim(), 1) for d in dims] if numbers.dim() else []
        kept = [d for d in range(numbers.dim()) if d not in dims]
        rows = numbers.permute(*kept, *dims).reshape(math.prod(numbers.shape[d] for d in kept), -1)
        if empty is None and rows.shape[1] == 0:
            raise UnknownOp(f"aten.{name} of nothing")
        made = []
        for row in rows:
            values = [p.convert(value, wanted) for value in tracer.values(row)]
            value = _reduced(p, instruction, values, p.convert(p.constant(empty if empty is not None else 0), wanted))
            if name == "mean":
                value = p.op("mul", value, p.constant(1.0 / rows.shape[1]))
            made.append(rounded(p, p.convert(value, kind(meta.dtype)), meta.dtype))
        return tracer.inside(made, meta)

    return handler


def _extreme(name: str) -> Callable[..., Any]:
    """Register ``max`` or ``min`` of all elements, or of two tensors. The variants with a dimension also return
    indices, and are not supported."""
    whole, of_two = _reduction(name, f"{name}imum", None, None), POINTWISE[f"{name}imum"]

    def handler(tracer: Any, meta: Tensor, a: Any, *other: Any) -> Any:
        return of_two(tracer, meta, a, *other) if other else whole(tracer, meta, a)

    return handler


def _bucketize(
    tracer: Any, meta: Tensor, a: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Return how many boundaries are below the element, or with ``right`` not above it."""
    p, type = tracer.program, common(a, boundaries)
    sorted_values = [p.convert(value, type) for value in tracer.values(tracer.numbers(boundaries))]

    def below(x: Value) -> Value:
        x = p.convert(x, type)
        passed = [p.convert(p.op("le" if right else "lt", boundary, x), "int") for boundary in sorted_values]
        return _reduced(p, "add", passed, p.constant(0))

    return each(tracer, meta, below, a)


def _searchsorted(
    tracer: Any, meta: Tensor, boundaries: Any, a: Any, *, right: bool = False, side: str | None = None, **rest: Any
) -> Any:
    if rest.get("sorter") is not None or boundaries.dim() != 1:
        raise UnknownOp("aten.searchsorted with a sorter or in rows")
    return _bucketize(tracer, meta, a, boundaries, right=right or side == "right")


INSTRUCTIONS = POINTWISE | {
    "index": _index, "embedding": _embedding, "index_select": _index_select, "new_ones": _ones, "ones_like": _ones,
    "new_zeros": _zeros,
    "zeros_like": _zeros, "new_empty": _zeros, "empty_like": _zeros, "full_like": _full_like, "new_full": _new_full,
    "scalar_tensor": _scalar_tensor, "dot": _dot, "vdot": _dot, "sum": _reduction("sum", "add", None, 0),
    "mean": _reduction("mean", "add", "float", None), "prod": _reduction("prod", "mul", None, 1),
    "max": _extreme("max"), "min": _extreme("min"),
    "amax": _reduction("amax", "maximum", None, None), "amin": _reduction("amin", "minimum", None, None),
    "any": _reduction("any", "or", "bool", False), "all": _reduction("all", "and", "bool", True),
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
}  # fmt: skip
"""The functions that write the instructions of each ATen op, by its name."""


_DUNDERS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "div": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "__lshift__", "rshift": "__rshift__", "neg": "neg", "abs": "abs", "invert": "bitwise_not",
}  # fmt: skip
_NAMED = """
    add sub mul div true_divide remainder fmod floor_divide maximum minimum lt le gt ge eq ne pow neg abs sign sqrt
    rsqrt exp exp2 expm1 log log2 log1p log10 logaddexp sin cos tan atan tanh sigmoid erf floor ceil trunc round square
    reciprocal clamp relu gelu silu isnan isinf where bitwise_and bitwise_or bitwise_xor bitwise_not logical_and
    logical_or logical_xor logical_not sum mean amax amin max min any all dot zeros_like ones_like new_ones new_zeros
    select unsqueeze squeeze detach clone contiguous masked_fill softplus log_sigmoid isfinite clamp_min
    clamp_max
"""
FUNCTIONS: dict[str, tuple[str, bool]] = {name: (name, False) for name in _NAMED.split()}
"""The ATen op that takes the same arguments as a torch function or Tensor method, by the name of the latter, and whether
the arguments are swapped."""
FUNCTIONS |= {
    "subtract": ("sub", False),
    "multiply": ("mul", False),
    "divide": ("div", False),
    "absolute": ("abs", False),
}
FUNCTIONS |= {
    name: ("_to_copy", False)
    for name in ("float", "int", "long", "bool", "half", "bfloat16", "double", "type_as", "to")
}
FUNCTIONS |= {f"__{dunder}__": (name, False) for dunder, name in _DUNDERS.items()}
FUNCTIONS |= {
    f"__r{dunder}__": (name, True)
    for dunder, name in _DUNDERS.items()
    if dunder not in ("lt", "le", "gt", "ge", "eq", "ne")
}

KEYWORDS = frozenset(("alpha", "rounding_mode", "min", "max", "approximate", "dim", "keepdim", "dtype"))
"""The keywords that are supported for these functions."""
