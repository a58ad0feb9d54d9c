# SPDX-License-Identifier: Apache-2.0
"""The common part of the tests of score programs: running one, checking it against the reference, and the programs of users."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tests import internals
from torch import Tensor

from lowbit import _C
from lowbit.reference import score_program as reference
from lowbit.score.program import TYPES, ProgramBuilder, Value

B, H, Q0, K0 = 1, 2, 37, 20
EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


POSITIVE = {"sqrt", "rsqrt", "log", "log2", "log1p", "pow"}
NEVER_ZERO = {"remainder", "fmod", "floor_divide", "floor_divide_int", "remainder_int", "trunc_divide_int", "fmod_int"}


FLOAT_ENDS = {
    torch.float32: [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -7.3, math.inf, -math.inf, math.nan, 1e-45, -1e-38, 3.4028234e38, -3.4028234e38, 16777217.0, 2147483648.0],
    torch.float64: [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -7.3, math.inf, -math.inf, math.nan, 5e-324, -1e-310, 1.79e308, -1.79e308, 9007199254740993.0, 4e9],
}
INT_ENDS = [0, 1, -1, 2, -3, 7, -7, 31, 32, 33, -31, 46341, 65536, 2**30, 2**31 - 1, -(2**31), -(2**31) + 1]


def operands(name: str, dtype: torch.dtype) -> tuple[ProgramBuilder, list[Value], list[Tensor]]:
    """Operands of an op: the score, then captured [rows, cols] tensors of values where the op has something to say."""
    types = _C.SCORE_OPS[name][1].partition(">")[0]
    program, values, captured = ProgramBuilder(), [], []
    q, k = program.op("q"), program.op("k")
    for place, letter in enumerate(types):
        if letter == "f" and place == 0:
            values.append(program.op("score"))
            continue
        type = next(t for t in TYPES if t[0] == letter)
        values.append(program.gather(program.captured(type, 2), q, k))
        if letter == "f":
            data = torch.randn(Q0 + 19, K0 + 33, dtype=dtype) * 2
            data.requires_grad_()
        elif letter == "b":
            data = torch.rand(Q0 + 19, K0 + 33) < 0.5
        elif name.startswith("shift"):  # of int32, which wraps
            data = torch.randint(*((0, 31) if place else (-5000, 5000)), (Q0 + 19, K0 + 33), dtype=torch.int32)
        else:
            data = torch.randint(-50, 50, (Q0 + 19, K0 + 33), dtype=torch.int64)
            if name in NEVER_ZERO and place == 1:
                data[data == 0] = 7
        captured.append(data)
    return program, values, captured


def interpret(code: list[int], captured: list[Tensor], scores: Tensor, q0: int = Q0, k0: int = K0) -> Tensor:
    """The program's results by the reference."""
    return reference.evaluate(code, _C.SCORE_OPS, captured, scores, b=B, h=H, q0=q0, k0=k0)


def run(code: list[int], captured: list[Tensor], scores: Tensor, q0: int = Q0, k0: int = K0) -> Tensor:
    result = scores.detach().clone()
    internals.score_program_eval(code, [tensor.detach() for tensor in captured], B, H, q0, k0, result)
    return result


def run_backward(
    code: list[int], captured: list[Tensor], scores: Tensor, gradient: Tensor, q0: int = Q0, k0: int = K0
) -> tuple[Tensor, list[Tensor | None]]:
    result = gradient.clone()
    sums = [torch.zeros(t.shape, dtype=scores.dtype) if t.requires_grad else None for t in captured]
    internals.score_program_backward(code, [t.detach() for t in captured], B, H, q0, k0, scores.detach(), result, sums)
    return result, sums


def close(actual: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Equal within ``tolerance`` of the value and of its neighbourhood; inf and nan where the reference has them."""
    wanted = wanted.double()
    same = (actual.double() == wanted) | (actual.isnan() & wanted.isnan())
    allowed = tolerance * (1 + wanted.abs())
    bad = ~same & ~((actual.double() - wanted).abs() <= allowed)
    assert not bad.any(), f"{what}: {actual[bad][:4].tolist()}, wanted {wanted[bad][:4].tolist()}"


def check(
    code: list[int], captured: list[Tensor], scores: Tensor, *, tolerance: float, backward: bool = True, q0: int = Q0, k0: int = K0
) -> None:
    """Forward, and the gradients of the scores and of captured tensors that require them, against `interpret` and autograd."""
    inputs = scores.double().requires_grad_()
    leaves = [t.detach().double().requires_grad_() if t.requires_grad else t.detach() for t in captured]
    wanted = interpret(code, leaves, inputs, q0, k0)
    close(run(code, captured, scores, q0, k0), wanted.detach(), tolerance, "forward")
    if not backward:
        return
    gradient = torch.randn(scores.shape, dtype=scores.dtype)
    needed = [inputs, *(t for t in leaves if t.requires_grad)]
    if wanted.requires_grad:
        found = torch.autograd.grad(wanted, needed, gradient.double(), allow_unused=True)
    else:
        found = (None,) * len(needed)
    exact = [torch.zeros_like(t) if g is None else g for t, g in zip(needed, found, strict=True)]
    of_scores, sums = run_backward(code, captured, scores, gradient, q0, k0)
    close(of_scores, exact[0], 8 * tolerance, "gradient of the scores")
    for got, want in zip((s for s in sums if s is not None), exact[1:], strict=True):
        close(got, want, 8 * tolerance * math.sqrt(scores.numel()), "gradient of a captured tensor")


# Each leans on another rate, fusion or form of index.


def alibi(p: ProgramBuilder) -> Value:
    slope = p.op("exp2", p.op("mul", p.constant(-0.8), p.convert(p.op("add", p.op("h"), p.constant(1)), "float")))
    distance = p.convert(p.op("sub", p.op("k"), p.op("q")), "float")
    return p.op("add", p.op("score"), p.op("mul", slope, distance))


def softcap(p: ProgramBuilder) -> Value:
    return p.op("mul", p.op("tanh", p.op("div", p.op("score"), p.constant(5.0))), p.constant(5.0))


def relative_table(p: ProgramBuilder) -> Value:
    table = p.captured("float", 1)
    return p.op("add", p.op("score"), p.gather(table, p.op("add", p.op("sub", p.op("q"), p.op("k")), p.constant(40))))


def clipped_table(p: ProgramBuilder) -> Value:
    table, distance = p.captured("float", 2), p.op("sub", p.op("q"), p.op("k"))
    clipped = p.op("minimum", p.op("maximum", distance, p.constant(-9)), p.constant(9))
    return p.op("add", p.op("score"), p.gather(table, p.op("h"), p.op("add", clipped, p.constant(9))))


def full_bias(p: ProgramBuilder) -> Value:
    return p.op("add", p.op("score"), p.gather(p.captured("float", 4), p.op("b"), p.op("h"), p.op("q"), p.op("k")))


def transposed_bias(p: ProgramBuilder) -> Value:
    return p.op("mul", p.op("score"), p.gather(p.captured("float", 2), p.op("k"), p.op("q")))


def head_scale_and_scalar(p: ProgramBuilder) -> Value:
    a, t = p.captured("float", 1), p.captured("float", 0)
    return p.op("add", p.op("mul", p.op("score"), p.gather(a, p.op("h"))), p.op("sin", p.gather(t)))


def row_and_column_bias(p: ProgramBuilder) -> Value:
    row, column = p.captured("float", 1), p.captured("float", 1)
    both = p.op("mul", p.op("tanh", p.gather(row, p.op("q"))), p.op("exp", p.gather(column, p.op("k"))))
    return p.op("add", p.op("score"), both)


def same_tensor_twice(p: ProgramBuilder) -> Value:
    bias = p.captured("float", 1)
    total = p.op("add", p.gather(bias, p.op("q")), p.op("mul", p.gather(bias, p.op("k")), p.op("score")))
    return p.op("add", p.op("score"), total)


def shuffled(p: ProgramBuilder) -> Value:
    table, order = p.captured("float", 1), p.captured("int", 1)
    return p.op("mul", p.op("score"), p.gather(table, p.gather(order, p.op("xor", p.op("q"), p.op("k")))))


def squared_where(p: ProgramBuilder) -> Value:
    s, far = p.op("score"), p.op("lt", p.constant(4), p.op("abs", p.op("sub", p.op("q"), p.op("k"))))
    return p.op("where", far, p.op("mul", s, s), p.op("maximum", s, p.op("mul", s, p.constant(0.1))))


def constant(p: ProgramBuilder) -> Value:
    return p.constant(0.25)


def per_row(p: ProgramBuilder) -> Value:
    return p.gather(p.captured("float", 1), p.op("q"))


def reused_output(p: ProgramBuilder) -> Value:
    t = p.op("tanh", p.op("add", p.op("score"), p.gather(p.captured("float", 2), p.op("q"), p.op("k"))))
    return p.op("add", t, p.op("mul", p.gather(p.captured("float", 1), p.op("h")), t))


def head_and_tile(p: ProgramBuilder) -> Value:
    """A share of the gradient per head, and one per score."""
    a = p.gather(p.captured("float", 1), p.op("h"))
    return p.op("add", p.op("tanh", p.op("add", p.op("score"), a)), p.op("mul", a, p.constant(0.25)))


def head_through_diagonal(p: ProgramBuilder) -> Value:
    """A sum over the diagonals of a sum over the tile."""
    a = p.op("tanh", p.gather(p.captured("float", 1), p.op("h")))
    return p.op("add", a, p.op("sin", p.convert(p.op("sub", p.op("k"), p.op("q")), "float")))


FLOATS: dict[Callable[[ProgramBuilder], Value], list[tuple[int, ...]]] = {
    alibi: [], softcap: [], relative_table: [(130,)], clipped_table: [(4, 19)], full_bias: [(2, 4, 120, 120)], transposed_bias: [(120, 120)],
    head_scale_and_scalar: [(4,), ()], row_and_column_bias: [(120,), (120,)], same_tensor_twice: [(120,)], shuffled: [(120,), (128,)],
    squared_where: [], constant: [], per_row: [(120,)], reused_output: [(120, 120), (4,)],
    head_and_tile: [(4,)], head_through_diagonal: [(4,)],
}  # fmt: skip


def tensors(build: Callable[[ProgramBuilder], Value], dtype: torch.dtype) -> list[Tensor]:
    if build is shuffled:
        return [torch.randn(120, dtype=dtype).requires_grad_(), torch.randint(-120, 120, (128,))]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in FLOATS[build]]


def code_of(build: Callable[[ProgramBuilder], Value]) -> list[int]:
    program = ProgramBuilder()
    return program.finish(build(program))


def gather_of_distance(size: int) -> list[int]:
    program = ProgramBuilder()
    index = program.op("sub", program.op("k"), program.op("q"))
    return program.finish(program.op("add", program.op("score"), program.gather(program.captured("float", 1), index)))


def causal(p: ProgramBuilder) -> Value:
    return p.op("le", p.op("k"), p.op("q"))


def window(p: ProgramBuilder) -> Value:
    return p.op("and", causal(p), p.op("le", p.op("sub", p.op("q"), p.op("k")), p.constant(70)))


def prefix(p: ProgramBuilder) -> Value:
    return p.op("or", causal(p), p.op("lt", p.op("k"), p.constant(50)))


def document(p: ProgramBuilder) -> Value:
    ids = p.captured("int", 1)
    return p.op("and", p.op("eq", p.gather(ids, p.op("q")), p.gather(ids, p.op("k"))), causal(p))


def dilated(p: ProgramBuilder) -> Value:
    distance = p.op("abs", p.op("sub", p.op("q"), p.op("k")))
    return p.op("and", p.op("le", distance, p.constant(90)), p.op("eq", p.op("remainder", distance, p.constant(3)), p.constant(0)))


def block_diagonal(p: ProgramBuilder) -> Value:
    return p.op("eq", p.op("floor_divide", p.op("q"), p.constant(48)), p.op("floor_divide", p.op("k"), p.constant(48)))


def dense(p: ProgramBuilder) -> Value:
    return p.gather(p.captured("bool", 4), p.op("b"), p.op("h"), p.op("q"), p.op("k"))


def per_head(p: ProgramBuilder) -> Value:
    limit = p.op("mul", p.op("add", p.op("h"), p.constant(1)), p.constant(40))
    return p.op("lt", p.convert(p.op("sub", p.op("k"), p.op("q")), "float"), p.convert(limit, "float"))


def everything(p: ProgramBuilder) -> Value:
    return p.constant(True)


def nothing(p: ProgramBuilder) -> Value:
    return p.op("lt", p.op("q"), p.constant(0))


MASKS = (causal, window, prefix, document, dilated, block_diagonal, dense, per_head, everything, nothing)
