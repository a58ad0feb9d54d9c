# SPDX-License-Identifier: Apache-2.0
"""Serialized score programs: random well-typed ones, and the same with some of their integers changed."""

from __future__ import annotations

import math

from lowbit import _C
from lowbit.reference.score_program import OPS
from lowbit.score.program import ProgramBuilder, Value

from ..choices import Choices
from ..tensors import booleans, header, integers, normal

_EXTREME_INTS = (0, 1, -1, 2, 127, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63))
_MOST = 1 << 22  # elements of a captured tensor: [128, 128, 165, 165] takes a minute to make on a busy machine
_LETTERS = {"f": "float", "i": "int", "b": "bool"}
_JUMPS = ("floor", "ceil", "trunc", "round", "sign", "remainder", "fmod", "floor_divide", "lt", "le", "eq", "ne", "float_to_int", "float_to_bool",
          "to_bfloat16", "to_float16", "tan", "pow", "div", "rsqrt", "log", "log2", "log1p", "sqrt", "exp", "exp2", "expm1", "sin", "cos")  # fmt: skip
_CONSTANTS = (1.0, 0.0, -1.0, 0.5, -2.5, float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-40)


def generate(choices: Choices) -> str:
    c = choices
    rows, cols = c.pick(16, 1, 5, 33, 128), c.pick(16, 1, 7, 33, 128, 136)
    q0, k0 = c.pick(0, 0, 37), c.pick(0, 0, 20)
    code, tensors, jumps = random_program(c, (2, 3, rows + q0, cols + k0))
    made = "".join(f"    {text},\n" for text in tensors)
    text = f"{header(c)}captured = [\n{made}]\n"
    if c.chance(50):
        code = _mutated(c, code)
        return f"{text}check.hostile({code}, captured, {rows}, {cols})\n"
    return f"{text}check.program({code}, captured, {rows}, {cols}, {q0}, {k0}, jumps={jumps})\n"


def random_program(c: Choices, sizes: tuple[int, ...]) -> tuple[list[int], list[str], bool]:
    p, tensors, jumps = ProgramBuilder(), [], False
    leaves = {name: p.op(name) for name in ("score", "b", "h", "q", "k")}
    values: dict[str, list[Value]] = {"float": [leaves["score"]], "int": [leaves[name] for name in "bhqk"], "bool": []}
    values["bool"].append(p.op("le", leaves["k"], leaves["q"]))
    extents = dict(zip("bhqk", sizes, strict=True))
    for _ in range(c.between(1, 10)):
        kind = c.pick("gather", "op", "op", "op", "const", "int const")
        if kind == "gather":
            names = [c.pick("q", "k", "h", "b") for _ in range(c.pick(1, 2, 3, 4, 0))]
            type = c.pick("float", "float", "int", "bool")
            while math.prod(extents[name] for name in names) > _MOST:
                names.pop()
            shape = [extents[name] for name in names]
            tensors.append(
                {"float": normal, "int": lambda sizes: integers(sizes, -9, 9), "bool": booleans}[type](shape)
            )
            values[type].append(p.gather(p.captured(type, len(names)), *(leaves[name] for name in names)))
        elif kind == "const":
            values["float"].append(p.constant(c.pick(*_CONSTANTS)))
        elif kind == "int const":
            values["int"].append(p.constant(c.pick(1, 2, -1, 7, 0)))
        else:
            name = c.pick(*sorted(OPS))
            wanted, _, result = _C.SCORE_OPS[name][1].partition(">")
            if not all(letter in _LETTERS and values[_LETTERS[letter]] for letter in wanted):
                continue
            jumps |= name in _JUMPS
            values[_LETTERS[result]].append(p.op(name, *(c.pick(*values[_LETTERS[letter]][::-1]) for letter in wanted)))
    output = (values["float"] if c.chance(70) else values["bool"])[-1]
    return p.finish(output), tensors, jumps


def _mutated(c: Choices, code: list[int]) -> list[int]:
    code = list(code)
    for _ in range(c.between(1, 3)):
        at, kind = (
            c.below(len(code)) if code else 0,
            c.pick("small", "extreme", "delete", "insert", "swap", "cut", "repeat"),
        )
        if kind == "small":
            code[at : at + 1] = [c.between(-2, 70)]
        elif kind == "extreme":
            code[at : at + 1] = [c.pick(*_EXTREME_INTS)]
        elif kind == "delete":
            del code[at : at + 1]
        elif kind == "insert":
            code.insert(at, c.between(-1, 80))
        elif kind == "swap" and code:
            other = c.below(len(code))
            code[at], code[other] = code[other], code[at]
        elif kind == "cut":
            code = code[:at]
        else:
            code += code[at : at + 6]
    return code
