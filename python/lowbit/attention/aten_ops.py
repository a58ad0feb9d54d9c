# SPDX-License-Identifier: Apache-2.0
"""What each ATen op means as score-program instructions. One row per op; the instructions are those of csrc/rules/score_ops.hpp.

A handler gets the tracer, the meta tensor of the result (its shape and dtype are torch's own answer) and the op's arguments. The type
of a program value is float, int or bool; floats are computed in float32 (float64 for float64 inputs), and rounded where torch's result
would be a bfloat16 or float16 tensor. Ints are 32-bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.attention.program import Value


class UnknownOp(Exception):
    """Something that a score program cannot express."""


VIEWS = frozenset((
    "select", "slice", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "unbind", "split",
    "split_with_sizes", "cat", "stack", "diagonal", "flip", "repeat",
))  # fmt: skip
"""Ops that move elements and compute nothing: applied to the numbers of the values."""

FUNCTIONS: dict[str, tuple[str, bool]] = {}
"""Name of a torch function or Tensor method: the ATen op that it is with the same arguments, and whether they are swapped."""

KEYWORDS = frozenset(("alpha", "rounding_mode", "min", "max", "approximate", "dim", "keepdim", "dtype"))
"""Keywords that those functions are followed with."""

INSTRUCTIONS: dict[str, Callable[..., Any]] = {}

_NARROW = (torch.int8, torch.uint8, torch.int16)


def kind(dtype: torch.dtype) -> str:
    """The type of a program value for a tensor of this dtype."""
    if dtype.is_complex or dtype in _NARROW:
        raise UnknownOp(f"arithmetic in {dtype}")
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        INSTRUCTIONS.update(dict.fromkeys(names, handler))
        return handler

    return add


def _each(tracer: Any, meta: Tensor, function: Callable[..., Value], *operands: Any) -> Any:
    """Apply a function of values element by element, broadcast; the result has the dtype and shape of meta."""
    columns = [tracer.values(numbers.expand(meta.shape)) for numbers in torch.broadcast_tensors(*map(tracer.numbers, operands))]
    wanted = kind(meta.dtype)
    values = [rounded(tracer.program, tracer.program.convert(function(*row), wanted), meta.dtype) for row in zip(*columns, strict=True)]
    return tracer.inside(values, meta)


def rounded(program: Any, value: Value, dtype: torch.dtype) -> Value:
    """The value as a tensor of this dtype would hold it."""
    return program.op("to_" + str(dtype).removeprefix("torch."), value) if dtype in (torch.bfloat16, torch.float16) else value


def _in(program: Any, type: str, name: str) -> Callable[..., Value]:
    """The op on operands converted to one type."""
    return lambda *operands: program.op(name, *(program.convert(operand, type) for operand in operands))


def _arithmetic(name: str, instruction: str, swapped: bool = False) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, b: Any, alpha: float = 1) -> Any:
        type = kind(meta.dtype)
        p = tracer.program
        if type == "bool":  # sums and products of bools
            type, apply = "bool", _in(p, "bool", {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}[instruction])
        else:
            apply = _in(p, type, instruction)
        if alpha != 1:
            scaled = _in(p, type, "mul")
            return _each(tracer, meta, lambda x, y: apply(x, scaled(y, p.constant(alpha))), *((b, a) if swapped else (a, b)))
        return _each(tracer, meta, apply, *((b, a) if swapped else (a, b)))

    INSTRUCTIONS[name] = handler


for _name in ("add", "sub", "mul", "maximum", "minimum", "remainder", "fmod", "floor_divide"):
    _arithmetic(_name, _name)
_arithmetic("rsub", "sub", swapped=True)


def _comparison(name: str, instruction: str, swapped: bool) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, b: Any) -> Any:
        p = tracer.program
        apply = _in(p, _common(a, b), instruction)
        return _each(tracer, meta, apply, *((b, a) if swapped else (a, b)))

    INSTRUCTIONS[name] = handler


def _common(*operands: Any) -> str:
    """The type that operands are compared in. Bools are compared as ints."""
    metas = [torch.empty((), dtype=item.dtype) if isinstance(item, Tensor) else item for item in operands]
    type = kind(functools.reduce(torch.promote_types, (torch.result_type(metas[0], meta) for meta in metas)))
    return "int" if type == "bool" else type


for _name, _instruction, _swapped in (
    ("lt", "lt", False), ("le", "le", False), ("gt", "lt", True), ("ge", "le", True), ("eq", "eq", False), ("ne", "ne", False),
):  # fmt: skip
    _comparison(_name, _instruction, _swapped)


@_row("div", "true_divide", "divide")
def _div(tracer: Any, meta: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    if rounding_mode == "floor":
        return _each(tracer, meta, _in(p, type, "floor_divide"), a, b)
    if rounding_mode == "trunc":
        if type == "int":
            return _each(tracer, meta, _in(p, "int", "trunc_divide"), a, b)
        return _each(tracer, meta, lambda x, y: p.op("trunc", _in(p, "float", "div")(x, y)), a, b)
    return _each(tracer, meta, _in(p, "float", "div"), a, b)


@_row("reciprocal")
def _reciprocal(tracer: Any, meta: Tensor, a: Any) -> Any:
    return _div(tracer, meta, 1.0, a)


@_row("pow")
def _pow(tracer: Any, meta: Tensor, a: Any, b: Any) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    number = b if isinstance(b, (int, float)) else None
    if number in (2.0, 3.0) or isinstance(b, int) and 0 <= b <= 8:

        def power(x: Value) -> Value:
            x = p.convert(x, type)
            return functools.reduce(lambda y, _: p.op("mul", y, x), range(int(b) - 1), x) if b else p.convert(p.constant(1), type)

        return _each(tracer, meta, power, a)
    if type == "int":
        raise UnknownOp("aten.pow of ints")
    if number == 0.5:
        return _each(tracer, meta, _in(p, "float", "sqrt"), a)
    return _each(tracer, meta, _in(p, "float", "pow"), a, b)


def _unary_float(name: str) -> None:
    INSTRUCTIONS[name] = lambda tracer, meta, a: _each(tracer, meta, _in(tracer.program, "float", name), a)


for _name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "atan", "tanh", "sigmoid", "erf"):
    _unary_float(_name)


def _unary(name: str, instruction: str) -> None:
    INSTRUCTIONS[name] = lambda tracer, meta, a: _each(tracer, meta, _in(tracer.program, kind(meta.dtype), instruction), a)


for _name, _instruction in (("neg", "neg"), ("abs", "abs"), ("sign", "sign"), ("sgn", "sign")):
    _unary(_name, _instruction)


def _rounding(name: str) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, *, decimals: int = 0) -> Any:
        if decimals:
            raise UnknownOp("aten.round to decimals")
        p = tracer.program
        return _each(tracer, meta, lambda x: p.op(name, x) if x.type == "float" else x, a)

    INSTRUCTIONS[name] = handler


for _name in ("floor", "ceil", "trunc", "round"):
    _rounding(_name)


def _bits(name: str, instruction: str) -> None:
    def handler(tracer: Any, meta: Tensor, *operands: Any) -> Any:
        type, p = kind(meta.dtype), tracer.program
        if type == "float":
            raise UnknownOp(f"aten.{name} of floats")
        return _each(tracer, meta, _in(p, type, instruction), *operands)

    INSTRUCTIONS[name] = handler


for _name in ("and", "or", "xor", "not"):
    for _form in (f"bitwise_{_name}", f"__{_name}__", f"__r{_name}__"):
        _bits(_form, _name)
for _name, _instruction in (("lshift", "shift_left"), ("rshift", "shift_right")):
    for _form in (f"__{_name}__", f"bitwise_{'left' if _name == 'lshift' else 'right'}_shift"):
        _bits(_form, _instruction)


def _logical(name: str) -> None:
    INSTRUCTIONS[f"logical_{name}"] = lambda tracer, meta, *operands: _each(tracer, meta, _in(tracer.program, "bool", name), *operands)


for _name in ("and", "or", "xor", "not"):
    _logical(_name)


@_row("where")
def _where(tracer: Any, meta: Tensor, condition: Any, a: Any, b: Any) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    return _each(
        tracer, meta, lambda c, x, y: p.op("where", p.convert(c, "bool"), p.convert(x, type), p.convert(y, type)), condition, a, b
    )


@_row("masked_fill")
def _masked_fill(tracer: Any, meta: Tensor, a: Any, condition: Any, value: Any) -> Any:
    return _where(tracer, meta, condition, value, a)


@_row("isnan")
def _isnan(tracer: Any, meta: Tensor, a: Any) -> Any:
    return _each(tracer, meta, lambda x: tracer.program.op("ne", x, x), a)


@_row("isinf")
def _isinf(tracer: Any, meta: Tensor, a: Any) -> Any:
    p = tracer.program
    return _each(tracer, meta, lambda x: p.op("eq", p.op("abs", p.convert(x, "float")), p.constant(math.inf)), a)


def _isinf_of(sign: float) -> Callable[..., Any]:
    def handler(tracer: Any, meta: Tensor, a: Any) -> Any:
        p = tracer.program
        return _each(tracer, meta, lambda x: p.op("eq", p.convert(x, "float"), p.constant(sign)), a)

    return handler


INSTRUCTIONS["isposinf"], INSTRUCTIONS["isneginf"] = _isinf_of(math.inf), _isinf_of(-math.inf)


@_row("clamp", "clip", "hardtanh")
def _clamp(tracer: Any, meta: Tensor, a: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = min if low is None else low, max if high is None else high
    type, p = kind(meta.dtype), tracer.program
    made = a
    if low is not None:
        made = _each(tracer, meta, _in(p, type, "maximum"), made, low)
    if high is not None:
        made = _each(tracer, meta, _in(p, type, "minimum"), made, high)
    return made


@_row("clamp_min")
def _clamp_min(tracer: Any, meta: Tensor, a: Any, low: Any) -> Any:
    return _clamp(tracer, meta, a, low)


@_row("clamp_max")
def _clamp_max(tracer: Any, meta: Tensor, a: Any, high: Any) -> Any:
    return _clamp(tracer, meta, a, None, high)


@_row("relu")
def _relu(tracer: Any, meta: Tensor, a: Any) -> Any:
    # not maximum(x, 0), whose gradient at 0 is a half
    p, type = tracer.program, kind(meta.dtype)
    zero = p.convert(p.constant(0), type)
    return _each(tracer, meta, lambda x: p.op("where", p.op("lt", zero, x), x, zero), a)


@_row("leaky_relu")
def _leaky_relu(tracer: Any, meta: Tensor, a: Any, slope: float = 0.01) -> Any:
    p = tracer.program
    zero, factor = p.constant(0.0), p.constant(float(slope))
    return _each(tracer, meta, lambda x: p.op("where", p.op("lt", zero, x), x, p.op("mul", x, factor)), a)


@_row("gelu")
def _gelu(tracer: Any, meta: Tensor, a: Any, *, approximate: str = "none") -> Any:
    p = tracer.program

    def times(x: Value, y: float) -> Value:
        return p.op("mul", x, p.constant(y))

    def gelu(x: Value) -> Value:
        if approximate == "none":
            part = p.op("erf", times(x, math.sqrt(0.5)))
        else:
            cube = p.op("mul", x, p.op("mul", x, x))
            part = p.op("tanh", times(p.op("add", x, times(cube, 0.044715)), math.sqrt(2 / math.pi)))
        return p.op("mul", times(x, 0.5), p.op("add", part, p.constant(1.0)))

    return _each(tracer, meta, gelu, a)


@_row("silu")
def _silu(tracer: Any, meta: Tensor, a: Any) -> Any:
    p = tracer.program
    return _each(tracer, meta, lambda x: p.op("mul", x, p.op("sigmoid", x)), a)


@_row("softplus")
def _softplus(tracer: Any, meta: Tensor, a: Any, beta: float = 1, threshold: float = 20) -> Any:
    p = tracer.program
    factor, limit = p.constant(float(beta)), p.constant(float(threshold))

    def softplus(x: Value) -> Value:
        scaled = p.op("mul", x, factor)
        small = p.op("minimum", scaled, limit)  # keeps exp, and so the gradient of the branch not taken, finite
        return p.op("where", p.op("lt", limit, scaled), x, p.op("div", p.op("log1p", p.op("exp", small)), factor))

    return _each(tracer, meta, softplus, a)


@_row("elu")
def _elu(tracer: Any, meta: Tensor, a: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    if scale != 1 or input_scale != 1:
        raise UnknownOp("aten.elu with scales")
    p = tracer.program
    zero, factor = p.constant(0.0), p.constant(float(alpha))

    def elu(x: Value) -> Value:
        return p.op("where", p.op("lt", zero, x), x, p.op("mul", p.op("expm1", p.op("minimum", x, zero)), factor))

    return _each(tracer, meta, elu, a)


@_row("log10")
def _log10(tracer: Any, meta: Tensor, a: Any) -> Any:
    p = tracer.program
    return _each(tracer, meta, lambda x: p.op("mul", p.op("log", p.convert(x, "float")), p.constant(1 / math.log(10))), a)


@_row("square")
def _square(tracer: Any, meta: Tensor, a: Any) -> Any:
    return _pow(tracer, meta, a, 2)


@_row("_to_copy")
def _to_copy(tracer: Any, meta: Tensor, a: Any, *_: Any, **__: Any) -> Any:
    return _each(tracer, meta, lambda x: x, a)


@_row("index")
def _index(tracer: Any, tensor: Any, indices: list[Any]) -> Any:
    from lowbit.attention.tracer import Inside, Part, StandIn

    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise UnknownOp("an index that is a mask")
    if isinstance(tensor, StandIn):
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
    meta = torch.empty((), dtype=tensor.dtype).expand([*numbers[0].shape, *left])
    if numbers[0].dim() == 0:
        return tracer.part(fixed(tuple(value for item in numbers for value in tracer.values(item))), meta)
    if len(given) < len(free):
        raise UnknownOp("a slice beside an index of several elements")
    rows = zip(*(tracer.values(item) for item in numbers), strict=True)
    return tracer.inside([tracer.gather(fixed(row), ()) for row in rows], meta)


@_row("embedding")
def _embedding(tracer: Any, meta: Tensor, weight: Any, indices: Any, *_: Any) -> Any:
    return _index(tracer, weight, [indices])


@_row("index_select")
def _index_select(tracer: Any, meta: Tensor, tensor: Any, dim: int, index: Any) -> Any:
    if index.dim():
        raise UnknownOp("aten.index_select by several elements")
    dim %= tensor.dim()
    return tracer.view("unsqueeze", tracer.view("index", tensor, [None] * dim + [index]), dim)


@_row("new_ones", "ones_like")
def _ones(tracer: Any, meta: Tensor, *_: Any, **__: Any) -> Any:
    return _each(tracer, meta, lambda x: x, 1)


@_row("new_zeros", "zeros_like", "new_empty", "empty_like")
def _zeros(tracer: Any, meta: Tensor, *_: Any, **__: Any) -> Any:
    return _each(tracer, meta, lambda x: x, 0)


@_row("full_like")
def _full_like(tracer: Any, meta: Tensor, _: Any, value: Any, **__: Any) -> Any:
    return _each(tracer, meta, lambda x: x, value)


@_row("new_full")
def _new_full(tracer: Any, meta: Tensor, _: Any, __: Any, value: Any, **___: Any) -> Any:
    return _each(tracer, meta, lambda x: x, value)


@_row("scalar_tensor")
def _scalar_tensor(tracer: Any, meta: Tensor, value: Any, **_: Any) -> Any:
    return _each(tracer, meta, lambda x: x, value)


@_row("dot", "vdot")
def _dot(tracer: Any, meta: Tensor, a: Any, b: Any) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    columns = [[p.convert(value, type) for value in tracer.values(tracer.numbers(operand))] for operand in (a, b)]
    products = [p.op("mul", x, y) for x, y in zip(*columns, strict=True)]
    return tracer.inside([rounded(p, _reduced(p, "add", products, p.convert(p.constant(0), type)), meta.dtype)], meta)


def _reduced(program: Any, instruction: str, values: list[Value], empty: Value) -> Value:
    return functools.reduce(lambda x, y: program.op(instruction, x, y), values) if values else empty


def _reduction(name: str, instruction: str, type: str | None, empty: float | bool | None) -> None:
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

    INSTRUCTIONS[name] = handler


for _name, _instruction, _type, _empty in (
    ("sum", "add", None, 0), ("mean", "add", "float", None), ("prod", "mul", None, 1), ("amax", "maximum", None, None),
    ("amin", "minimum", None, None), ("any", "or", "bool", False), ("all", "and", "bool", True),
):  # fmt: skip
    _reduction(_name, _instruction, _type, _empty)


_DUNDERS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "div": "div", "floordiv": "floor_divide", "mod": "remainder", "pow": "pow",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "__lshift__", "rshift": "__rshift__", "neg": "neg", "abs": "abs", "invert": "bitwise_not",
}  # fmt: skip
_NAMED = """
    add sub mul div true_divide remainder fmod floor_divide maximum minimum lt le gt ge eq ne pow neg abs sign sqrt rsqrt exp exp2 expm1 log
    log2 log1p log10 sin cos tan atan tanh sigmoid erf floor ceil trunc round square reciprocal clamp relu gelu silu isnan isinf where
    bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not sum mean amax amin any all dot
    zeros_like ones_like new_ones new_zeros select unsqueeze squeeze
"""
FUNCTIONS |= {name: (name, False) for name in _NAMED.split()}
FUNCTIONS |= {"subtract": ("sub", False), "multiply": ("mul", False), "divide": ("div", False), "absolute": ("abs", False)}
FUNCTIONS |= {name: ("_to_copy", False) for name in ("float", "int", "long", "bool", "half", "bfloat16", "double", "type_as")}
FUNCTIONS |= {f"__{dunder}__": (name, False) for dunder, name in _DUNDERS.items()}
FUNCTIONS |= {f"__r{dunder}__": (name, True) for dunder, name in _DUNDERS.items() if dunder not in ("lt", "le", "gt", "ge", "eq", "ne")}
