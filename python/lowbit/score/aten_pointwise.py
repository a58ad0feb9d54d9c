# SPDX-License-Identifier: Apache-2.0
"""Pointwise ATen ops as score-program instructions, one handler per op. The instructions are those of
csrc/score/ops.hpp.

A handler gets the tracer, the meta tensor of the result (whose shape and dtype torch itself has determined) and the
op's arguments. The type of a program value is float, int or bool. Floats are computed in float32 (float64 for float64
inputs), and rounded where torch's result would be a bfloat16 or float16 tensor. Ints have 32 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.score.program import UnknownOp, Value

POINTWISE: dict[str, Callable[..., Any]] = {}

_NARROW = (torch.int8, torch.uint8, torch.int16)


def kind(dtype: torch.dtype) -> str:
    """Return the type of a program value for a tensor of this dtype."""
    if dtype.is_complex or dtype in _NARROW:
        raise UnknownOp(f"arithmetic in {dtype}")
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        POINTWISE.update(dict.fromkeys(names, handler))
        return handler

    return add


def each(tracer: Any, meta: Tensor, function: Callable[..., Value], *operands: Any) -> Any:
    """Apply a function of values element by element, with broadcasting. The result has the dtype and shape of
    ``meta``."""
    columns = [
        tracer.values(numbers.expand(meta.shape)) for numbers in torch.broadcast_tensors(*map(tracer.numbers, operands))
    ]
    wanted = kind(meta.dtype)
    values = [
        rounded(tracer.program, tracer.program.convert(function(*row), wanted), meta.dtype)
        for row in zip(*columns, strict=True)
    ]
    return tracer.inside(values, meta)


def rounded(program: Any, value: Value, dtype: torch.dtype) -> Value:
    """Return the value as rounded by a tensor of this dtype."""
    return (
        program.op("to_" + str(dtype).removeprefix("torch."), value)
        if dtype in (torch.bfloat16, torch.float16)
        else value
    )


def _in(program: Any, type: str, name: str) -> Callable[..., Value]:
    """Return the op with its operands converted to one type."""
    return lambda *operands: program.op(name, *(program.convert(operand, type) for operand in operands))


def _arithmetic(name: str, instruction: str, swapped: bool = False) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, b: Any, alpha: float = 1) -> Any:
        type = kind(meta.dtype)
        p = tracer.program
        if type == "bool":  # sums and products of bools
            type, apply = (
                "bool",
                _in(p, "bool", {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}[instruction]),
            )
        else:
            apply = _in(p, type, instruction)
        if alpha != 1:
            scaled = _in(p, type, "mul")
            return each(
                tracer, meta, lambda x, y: apply(x, scaled(y, p.constant(alpha))), *((b, a) if swapped else (a, b))
            )
        return each(tracer, meta, apply, *((b, a) if swapped else (a, b)))

    POINTWISE[name] = handler


for _name in ("add", "sub", "mul", "maximum", "minimum", "remainder", "fmod", "floor_divide"):
    _arithmetic(_name, _name)
_arithmetic("rsub", "sub", swapped=True)


def _comparison(name: str, instruction: str, swapped: bool) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, b: Any) -> Any:
        p = tracer.program
        apply = _in(p, common(a, b), instruction)
        return each(tracer, meta, apply, *((b, a) if swapped else (a, b)))

    POINTWISE[name] = handler


def common(*operands: Any) -> str:
    """Return the type in which operands are compared. Bools are compared as ints."""
    metas = [torch.empty((), dtype=item.dtype, device="cpu") if isinstance(item, Tensor) else item for item in operands]
    type = kind(functools.reduce(torch.promote_types, (torch.result_type(metas[0], meta) for meta in metas)))
    return "int" if type == "bool" else type


for _name, _instruction, _swapped in (
    ("lt", "lt", False), ("le", "le", False), ("gt", "lt", True), ("ge", "le", True), ("eq", "eq", False),
    ("ne", "ne", False),
):  # fmt: skip
    _comparison(_name, _instruction, _swapped)


@_row("div", "true_divide", "divide")
def _div(tracer: Any, meta: Tensor, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    if rounding_mode == "floor":
        return each(tracer, meta, _in(p, type, "floor_divide"), a, b)
    if rounding_mode == "trunc":
        if type == "int":
            return each(tracer, meta, _in(p, "int", "trunc_divide"), a, b)
        return each(tracer, meta, lambda x, y: p.op("trunc", _in(p, "float", "div")(x, y)), a, b)
    return each(tracer, meta, _in(p, "float", "div"), a, b)


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
            return (
                functools.reduce(lambda y, _: p.op("mul", y, x), range(int(b) - 1), x)
                if b
                else p.convert(p.constant(1), type)
            )

        return each(tracer, meta, power, a)
    if type == "int":
        raise UnknownOp("aten.pow of ints")
    if number == 0.5:
        return each(tracer, meta, _in(p, "float", "sqrt"), a)
    return each(tracer, meta, _in(p, "float", "pow"), a, b)


def _unary_float(name: str) -> None:
    POINTWISE[name] = lambda tracer, meta, a: each(tracer, meta, _in(tracer.program, "float", name), a)


for _name in (
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sin",
    "cos",
    "tan",
    "atan",
    "tanh",
    "sigmoid",
    "erf",
):
    _unary_float(_name)


def _unary(name: str, instruction: str) -> None:
    POINTWISE[name] = lambda tracer, meta, a: each(tracer, meta, _in(tracer.program, kind(meta.dtype), instruction), a)


for _name, _instruction in (("neg", "neg"), ("abs", "abs"), ("sign", "sign"), ("sgn", "sign")):
    _unary(_name, _instruction)


def _rounding(name: str) -> None:
    def handler(tracer: Any, meta: Tensor, a: Any, *, decimals: int = 0) -> Any:
        if decimals:
            raise UnknownOp("aten.round to decimals")
        p = tracer.program
        return each(tracer, meta, lambda x: p.op(name, x) if x.type == "float" else x, a)

    POINTWISE[name] = handler


for _name in ("floor", "ceil", "trunc", "round"):
    _rounding(_name)


def _bits(name: str, instruction: str) -> None:
    def handler(tracer: Any, meta: Tensor, *operands: Any) -> Any:
        type, p = kind(meta.dtype), tracer.program
        if type == "float":
            raise UnknownOp(f"aten.{name} of floats")
        return each(tracer, meta, _in(p, type, instruction), *operands)

    POINTWISE[name] = handler


for _name in ("and", "or", "xor", "not"):
    for _form in (f"bitwise_{_name}", f"__{_name}__", f"__r{_name}__"):
        _bits(_form, _name)
for _name, _instruction in (("lshift", "shift_left"), ("rshift", "shift_right")):
    for _form in (f"__{_name}__", f"bitwise_{'left' if _name == 'lshift' else 'right'}_shift"):
        _bits(_form, _instruction)


def _logical(name: str) -> None:
    POINTWISE[f"logical_{name}"] = lambda tracer, meta, *operands: each(
        tracer, meta, _in(tracer.program, "bool", name), *operands
    )


for _name in ("and", "or", "xor", "not"):
    _logical(_name)


@_row("where")
def _where(tracer: Any, meta: Tensor, condition: Any, a: Any, b: Any) -> Any:
    p, type = tracer.program, kind(meta.dtype)
    return each(
        tracer,
        meta,
        lambda c, x, y: p.op("where", p.convert(c, "bool"), p.convert(x, type), p.convert(y, type)),
        condition,
        a,
        b,
    )


@_row("masked_fill")
def _masked_fill(tracer: Any, meta: Tensor, a: Any, condition: Any, value: Any) -> Any:
    return _where(tracer, meta, condition, value, a)


def _is(name: str, test: Callable[[Any, Value], Value]) -> None:
    POINTWISE[name] = lambda tracer, meta, a: each(
        tracer, meta, lambda x: test(tracer.program, tracer.program.convert(x, "float")), a
    )


_is("isnan", lambda p, x: p.op("ne", x, x))
_is("isinf", lambda p, x: p.op("eq", p.op("abs", x), p.constant(math.inf)))
_is("isfinite", lambda p, x: p.op("lt", p.op("abs", x), p.constant(math.inf)))
_is("isposinf", lambda p, x: p.op("eq", x, p.constant(math.inf)))
_is("isneginf", lambda p, x: p.op("eq", x, p.constant(-math.inf)))


@_row("clamp", "clip", "hardtanh")
def _clamp(
    tracer: Any, meta: Tensor, a: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None
) -> Any:
    low, high = min if low is None else low, max if high is None else high
    type, p = kind(meta.dtype), tracer.program
    made = a
    if low is not None:
        made = each(tracer, meta, _in(p, type, "maximum"), made, low)
    if high is not None:
        made = each(tracer, meta, _in(p, type, "minimum"), made, high)
    return made


@_row("clamp_min")
def _clamp_min(tracer: Any, meta: Tensor, a: Any, low: Any) -> Any:
    return _clamp(tracer, meta, a, low)


@_row("clamp_max")
def _clamp_max(tracer: Any, meta: Tensor, a: Any, high: Any) -> Any:
    return _clamp(tracer, meta, a, None, high)


@_row("relu")
def _relu(tracer: Any, meta: Tensor, a: Any) -> Any:
    # not maximum(x, 0), whose gradient at 0 is a half; nan stays nan
    p, type = tracer.program, kind(meta.dtype)
    zero = p.convert(p.constant(0), type)
    return each(tracer, meta, lambda x: p.op("where", p.op("le", x, zero), zero, x), a)


def _formula(name: str, operands: int = 1) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register an op on float operands, written as ``(program, *operands, *further arguments) -> value``."""

    def add(formula: Callable[..., Value]) -> Callable[..., Value]:
        def handler(tracer: Any, meta: Tensor, *args: Any, **kwargs: Any) -> Any:
            p = tracer.program

            def apply(*values: Value) -> Value:
                return formula(p, *(p.convert(value, "float") for value in values), *args[operands:], **kwargs)

            return each(tracer, meta, apply, *args[:operands])

        POINTWISE[name] = handler
        return formula

    return add


@_formula("leaky_relu")
def _leaky_relu(p: Any, x: Value, slope: float = 0.01) -> Value:
    return p.op("where", p.op("lt", p.constant(0.0), x), x, p.op("mul", x, p.constant(float(slope))))


@_formula("gelu")
def _gelu(p: Any, x: Value, *, approximate: str = "none") -> Value:
    def times(x: Value, y: float) -> Value:
        return p.op("mul", x, p.constant(y))

    if approximate == "none":
        part = p.op("erf", times(x, math.sqrt(0.5)))
    else:
        cube = p.op("mul", x, p.op("mul", x, x))
        part = p.op("tanh", times(p.op("add", x, times(cube, 0.044715)), math.sqrt(2 / math.pi)))
    return p.op("mul", times(x, 0.5), p.op("add", part, p.constant(1.0)))


@_formula("silu")
def _silu(p: Any, x: Value) -> Value:
    return p.op("mul", x, p.op("sigmoid", x))


@_formula("softplus")
def _softplus(p: Any, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    factor, limit = p.constant(float(beta)), p.constant(float(threshold))
    scaled = p.op("mul", x, factor)
    small = p.op("minimum", scaled, limit)  # keeps exp finite, and so the gradient of the branch not taken
    return p.op("where", p.op("lt", limit, scaled), x, p.op("div", p.op("log1p", p.op("exp", small)), factor))


@_formula("log_sigmoid")
def _log_sigmoid(p: Any, x: Value) -> Value:
    rest = p.op("log1p", p.op("exp", p.op("neg", p.op("abs", x))))
    return p.op("sub", p.op("minimum", x, p.constant(0.0)), rest)


@_formula("mish")
def _mish(p: Any, x: Value) -> Value:
    return p.op("mul", x, p.op("tanh", _softplus(p, x)))


@_formula("hardsigmoid")
def _hardsigmoid(p: Any, x: Value) -> Value:
    line = p.op("div", p.op("add", x, p.constant(3.0)), p.constant(6.0))
    inside = p.op(
        "and", p.op("lt", p.constant(-3.0), x), p.op("lt", x, p.constant(3.0))
    )  # no gradient at the ends, as in torch
    outside = p.op("where", p.op("lt", p.constant(0.0), x), p.constant(1.0), p.constant(0.0))
    return p.op("where", p.op("or", inside, p.op("ne", x, x)), line, outside)


@_formula("hardswish")
def _hardswish(p: Any, x: Value) -> Value:
    return p.op("mul", x, _hardsigmoid(p, x))


@_formula("elu")
def _elu(p: Any, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    zero = p.constant(0.0)
    below = p.op("mul", p.op("minimum", x, zero), p.constant(float(input_scale)))
    made = p.op("where", p.op("lt", zero, x), x, p.op("mul", p.op("expm1", below), p.constant(float(alpha))))
    return p.op("mul", made, p.constant(float(scale)))


@_formula("log10")
def _log10(p: Any, x: Value) -> Value:
    return p.op("mul", p.op("log", x), p.constant(1 / math.log(10)))


@_formula("frac")
def _frac(p: Any, x: Value) -> Value:
    return p.op("sub", x, p.op("trunc", x))


@_formula("lerp", operands=3)
def _lerp(p: Any, x: Value, y: Value, weight: Value) -> Value:
    return p.op("add", x, p.op("mul", weight, p.op("sub", y, x)))


@_formula("logaddexp", operands=2)
def _logaddexp(p: Any, x: Value, y: Value) -> Value:
    apart = p.op("where", p.op("eq", x, y), p.constant(0.0), p.op("sub", x, y))  # inf - inf would be nan
    return p.op("add", p.op("maximum", x, y), p.op("log1p", p.op("exp", p.op("neg", p.op("abs", apart)))))


@_formula("threshold")
def _threshold(p: Any, x: Value, limit: float, otherwise: float) -> Value:
    return p.op("where", p.op("le", x, p.constant(float(limit))), p.constant(float(otherwise)), x)


@_row("addcmul")
def _addcmul(tracer: Any, meta: Tensor, a: Any, b: Any, c: Any, *, value: float = 1) -> Any:
    product = POINTWISE["mul"](tracer, meta, b, c)
    return POINTWISE["add"](tracer, meta, a, product, value)


@_row("nan_to_num")
def _nan_to_num(
    tracer: Any,
    meta: Tensor,
    a: Any,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Any:
    p, most = tracer.program, torch.finfo(meta.dtype if meta.is_floating_point() else torch.float32).max
    numbers = (0.0 if nan is None else nan, most if posinf is None else posinf, -most if neginf is None else neginf)
    for_nan, for_high, for_low = (p.constant(float(number)) for number in numbers)

    def finite(x: Value) -> Value:
        x = p.convert(x, "float")
        x = p.op("where", p.op("eq", x, p.constant(math.inf)), for_high, x)
        x = p.op("where", p.op("eq", x, p.constant(-math.inf)), for_low, x)
        return p.op("where", p.op("ne", x, x), for_nan, x)

    return each(tracer, meta, finite, a)


@_row("square")
def _square(tracer: Any, meta: Tensor, a: Any) -> Any:
    return _pow(tracer, meta, a, 2)


@_row("_to_copy")
def _to_copy(tracer: Any, meta: Tensor, a: Any, *_: Any, **__: Any) -> Any:
    return each(tracer, meta, lambda x: x, a)
