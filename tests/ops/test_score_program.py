# SPDX-License-Identifier: Apache-2.0
"""Score programs: every op against torch, forward and backward, on every row; indices, rates, random programs; bad code is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import _C, testing
from lowbit.attention.program import TYPES, ProgramBuilder, Value

B, H, Q0, K0 = 1, 2, 37, 20
EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
NAMES = {opcode: name for name, (opcode, _) in _C.SCORE_OPS.items()}
INTERNAL = {"gradient", "k_minus_q", "scatter_add", "sum", "copy", "multiply_add", "scaled_tanh"}
LEAVES = {"score", "b", "h", "q", "k", "float_const", "int_const", "bool_const", "gather"}
TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum,
    "remainder": torch.remainder, "fmod": torch.fmod, "floor_divide": lambda a, b: torch.floor_divide(a.detach(), b.detach()), "pow": torch.pow, "neg": torch.neg, "sign": torch.sign,
    "abs": torch.abs, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "atan": torch.atan, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf,
    "to_bfloat16": lambda x: x + (x.detach().bfloat16().double() - x.detach()), "to_float16": lambda x: x + (x.detach().half().double() - x.detach()),
    "add_int": torch.add, "sub_int": torch.sub, "mul_int": torch.mul, "floor_divide_int": torch.floor_divide, "remainder_int": torch.remainder,
    "trunc_divide_int": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "fmod_int": torch.fmod, "maximum_int": torch.maximum,
    "minimum_int": torch.minimum, "neg_int": torch.neg, "abs_int": torch.abs, "sign_int": torch.sign, "and_int": torch.bitwise_and,
    "or_int": torch.bitwise_or, "xor_int": torch.bitwise_xor, "not_int": torch.bitwise_not, "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift, "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne, "lt_int": torch.lt,
    "le_int": torch.le, "eq_int": torch.eq, "ne_int": torch.ne, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "not": torch.logical_not, "where": torch.where, "where_int": torch.where, "where_bool": torch.where,
    "int_to_float": lambda x: x.double(), "bool_to_float": lambda x: x.double(), "bool_to_int": lambda x: x.int(),
    "float_to_int": lambda x: x.int(), "float_to_bool": lambda x: x != 0, "int_to_bool": lambda x: x != 0,
}  # fmt: skip


def interpret(code: list[int], captured: list[Tensor], scores: Tensor, q0: int = Q0, k0: int = K0) -> Tensor:
    """The meaning of a program: torch in float64 and int32, one element of ``scores`` per (q, k)."""
    rows, cols = scores.shape
    leaves = {
        "score": scores,
        "b": torch.tensor(B, dtype=torch.int32),
        "h": torch.tensor(H, dtype=torch.int32),
        "q": torch.arange(q0, q0 + rows, dtype=torch.int32)[:, None],
        "k": torch.arange(k0, k0 + cols, dtype=torch.int32)[None, :],
    }
    count = code[1]
    output, at, values = code[2 + 2 * count], 3 + 2 * count, []
    while at < len(code):
        name = NAMES[code[at]]
        if name in leaves:
            value, used = leaves[name], 0
        elif name == "float_const":
            value, used = torch.tensor(struct.unpack("<d", struct.pack("<q", code[at + 1]))[0], dtype=torch.float64), 1
        elif name in ("int_const", "bool_const"):
            value, used = torch.tensor(code[at + 1], dtype=torch.int32 if name == "int_const" else torch.bool), 1
        elif name == "gather":
            tensor = captured[code[at + 1]]
            indices = tuple(values[i].long() for i in code[at + 2 : at + 2 + tensor.ndim])
            value, used = tensor[indices], 1 + tensor.ndim
            value = value.double() if value.is_floating_point() else value
        else:
            used = len(_C.SCORE_OPS[name][1].partition(">")[0])
            value = TORCH[name](*(values[i] for i in code[at + 1 : at + 1 + used]))
        values.append(value)
        at += 1 + used
    return values[output].expand(rows, cols)


def run(code: list[int], captured: list[Tensor], scores: Tensor, q0: int = Q0, k0: int = K0) -> Tensor:
    result = scores.detach().clone()
    _C.score_program_eval(code, [tensor.detach() for tensor in captured], B, H, q0, k0, result)
    return result


def run_backward(
    code: list[int], captured: list[Tensor], scores: Tensor, gradient: Tensor, q0: int = Q0, k0: int = K0
) -> tuple[Tensor, list[Tensor | None]]:
    result = gradient.clone()
    sums = [torch.zeros(t.shape, dtype=scores.dtype) if t.requires_grad else None for t in captured]
    _C.score_program_backward(code, [t.detach() for t in captured], B, H, q0, k0, scores.detach(), result, sums)
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


@pytest.fixture(params=testing.rows("score_program"), ids=lambda row: str(row["name"]))
def row(request: pytest.FixtureRequest) -> str:
    """Every row of the op, forced; what ran is checked."""
    if not request.param["available"]:
        pytest.skip(f"{request.param['name']}: {request.param['reason']}")
    name = str(request.param["name"])
    previous = _C.force_kernel(name)
    yield name
    _C.force_kernel(previous)
    assert _C.last_kernel("score_program") == name


def test_every_op_has_a_test() -> None:
    assert set(TORCH) | INTERNAL | LEAVES == set(_C.SCORE_OPS)


POSITIVE = {"sqrt", "rsqrt", "log", "log2", "log1p", "pow"}
NEVER_ZERO = {"remainder", "fmod", "floor_divide", "floor_divide_int", "remainder_int", "trunc_divide_int", "fmod_int"}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", sorted(TORCH))
def test_op_is_that_of_torch(row: str, name: str, dtype: torch.dtype) -> None:
    program, values, captured = operands(name, dtype)
    result = program.op(name, *values)
    scores = torch.randn(19, 33, dtype=dtype) * 3
    if name in POSITIVE:
        scores = scores.abs() + 0.1
    if result.type == "bool" and "score" not in name:  # a mask: the score or -inf, and as a number
        masked = run(program.finish(result), captured, scores)
        wanted = interpret(program.finish(result), captured, scores.double())
        assert torch.equal(masked, torch.where(wanted, scores, -math.inf))
    code = program.finish(program.convert(result, "float"))
    # Values that round to 16 bits from float32 or float64 alike; two units in the last place elsewhere, and what one of the argument makes of it.
    slope = {"tan": 400, "pow": 200, "exp2": 30, "exp": 30, "expm1": 30, "remainder": 20, "fmod": 20}.get(name, 4)
    check(code, captured, scores, tolerance=slope * EPSILON[dtype])


@pytest.mark.parametrize("name", sorted(n for n in TORCH if _C.SCORE_OPS[n][1] in ("f>f", "ff>f") and n not in ("pow", "remainder", "fmod", "floor_divide")))
def test_op_takes_infinities_and_nan_as_torch_does(row: str, name: str) -> None:
    program = ProgramBuilder()
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -3e38, 88.9, -104.5])
    operands = [program.op("score")]
    if _C.SCORE_OPS[name][1] == "ff>f":
        operands.append(program.gather(program.captured("float", 1), program.op("q")))
    code = program.finish(program.op(name, *operands))
    scores = special.expand(len(special), -1).clone()
    got = run(code, [special][: len(operands) - 1], scores, q0=0)
    wanted = TORCH[name](scores, special[:, None]) if len(operands) == 2 else TORCH[name](scores.double()).float()
    if name.startswith("to_"):
        wanted = scores.to(getattr(torch, name.removeprefix("to_"))).float()
    if name in ("sin", "cos", "tan"):  # of 3e38: any library's own reduction
        got[:, 8:10] = wanted[:, 8:10] = 0
    if name == "sign":
        got[:, 6] = wanted[:, 6] = 0
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    close(got, wanted, 4 * EPSILON[torch.float32], name)


# Programs of users: each leans on another rate, recogniser or form of index.


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


FLOATS: dict[Callable[[ProgramBuilder], Value], list[tuple[int, ...]]] = {
    alibi: [], softcap: [], relative_table: [(130,)], clipped_table: [(4, 19)], full_bias: [(2, 4, 120, 120)], transposed_bias: [(120, 120)],
    head_scale_and_scalar: [(4,), ()], row_and_column_bias: [(120,), (120,)], same_tensor_twice: [(120,)], shuffled: [(120,), (128,)],
    squared_where: [], constant: [], per_row: [(120,)], reused_output: [(120, 120), (4,)],
}  # fmt: skip


def tensors(build: Callable[[ProgramBuilder], Value], dtype: torch.dtype) -> list[Tensor]:
    if build is shuffled:
        return [torch.randn(120, dtype=dtype).requires_grad_(), torch.randint(-120, 120, (128,))]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in FLOATS[build]]


def code_of(build: Callable[[ProgramBuilder], Value]) -> list[int]:
    program = ProgramBuilder()
    return program.finish(build(program))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 64), (5, 100), (33, 16)], ids=str)
@pytest.mark.parametrize("build", FLOATS, ids=lambda build: build.__name__)
def test_program_forward_and_backward(row: str, build: Callable[[ProgramBuilder], Value], shape: tuple[int, int], dtype: torch.dtype) -> None:
    q0, k0 = (37, 20) if shape[1] < 100 else (20, 0)
    scores = torch.randn(shape, dtype=dtype)
    check(code_of(build), tensors(build, dtype), scores, tolerance=16 * EPSILON[dtype], q0=q0, k0=k0)


@pytest.mark.parametrize("build", FLOATS, ids=lambda build: build.__name__)
def test_tile_wider_than_a_strip(build: Callable[[ProgramBuilder], Value]) -> None:
    captured = [t if t.ndim < 2 else t.detach()[..., :1, :1].expand(t.shape).clone().requires_grad_() for t in tensors(build, torch.float64)]
    captured = [torch.randn(tuple(700 if n == 120 else n for n in t.shape), dtype=t.dtype).requires_grad_() if t.requires_grad else t for t in captured]
    if build is shuffled:
        captured[1] = torch.randint(-120, 120, (1024,))
    if build is relative_table:
        captured[0] = torch.randn(900, dtype=torch.float64, requires_grad=True)
    check(code_of(build), captured, torch.randn(9, 601, dtype=torch.float64), tolerance=16 * EPSILON[torch.float64], q0=3, k0=0)


# Masks and their blocks.


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


@pytest.mark.parametrize("q_block, kv_block", [(128, 128), (32, 64), (16, 300), (1, 1), (400, 400)])
@pytest.mark.parametrize("lengths", [(256, 256), (100, 300), (257, 129), (1, 1), (7, 0)], ids=str)
@pytest.mark.parametrize("build", MASKS, ids=lambda build: build.__name__)
def test_block_classes_are_those_of_the_dense_mask(
    build: Callable[[ProgramBuilder], Value], lengths: tuple[int, int], q_block: int, kv_block: int
) -> None:
    (q_len, kv_len), code = lengths, code_of(build)
    captured = [(torch.arange(300) // 37 * (1 - 2 * (torch.arange(300) > 200).long()))] if build is document else []
    if build is dense:
        captured = [(torch.rand(1, 1, -(-q_len // 16), -(-kv_len // 16)) < 0.4).repeat_interleave(16, 2).repeat_interleave(16, 3).expand(2, 3, -1, -1)]
    q_blocks, kv_blocks = -(-q_len // q_block), -(-kv_len // kv_block)
    classes = torch.full((2, 3, q_blocks, kv_blocks), 9, dtype=torch.uint8)
    _C.block_classes(code, captured, 2, 3, q_len, kv_len, q_block, kv_block, classes)
    for b in range(2):
        for h in range(3):
            whole = torch.zeros(q_blocks * q_block, kv_blocks * kv_block)
            if q_len and kv_len:
                scores = torch.zeros(q_len, kv_len)
                _C.score_program_eval(code, captured, b, h, 0, 0, scores)
                whole[:q_len, :kv_len] = (scores == 0).float()
            counts = whole.view(q_blocks, q_block, kv_blocks, kv_block).sum((1, 3))
            wanted = (counts > 0).int() + (counts == q_block * kv_block).int()
            assert torch.equal(classes[b, h].int(), wanted)


@pytest.mark.parametrize("build, most", [(causal, 64), (window, 128), (document, 64 + 2 * 8), (everything, 0), (nothing, 0)])
def test_intervals_decide_most_blocks(build: Callable[[ProgramBuilder], Value], most: int) -> None:
    ids = torch.arange(8192) * 8 // 8192
    classes = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    captured = [ids] if build is document else []
    assert _C.block_classes(code_of(build), captured, 1, 1, 8192, 8192, 128, 128, classes) <= most


# Random programs: any mixture of types and rates. Ops whose result jumps (floor, comparisons of computed floats) would make rounding visible.

UNARY = ("neg", "abs", "tanh", "sin", "cos", "sigmoid", "erf", "atan")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
INT_BINARY = ("add", "sub", "mul", "maximum", "minimum", "and_int", "or_int", "xor_int")
INT_CONSTANT = ("floor_divide", "remainder", "trunc_divide_int", "fmod", "shift_right")


@st.composite
def random_program(draw: st.DrawFn) -> list[int]:
    """A score program over the captured tensors [40] float, [3, 50] float, [64] int32, [20, 70] bool."""
    p = ProgramBuilder()
    line, table = p.captured("float", 1), p.captured("float", 2)
    order, grid = p.captured("int", 1), p.captured("bool", 2)
    values: dict[str, list[Value]] = {
        "float": [p.op("score"), p.constant(0.5)],
        "int": [p.op(name) for name in ("b", "h", "q", "k")] + [p.constant(draw(st.integers(-7, 7)))],
        "bool": [p.constant(True), p.op("le", p.op("k"), p.op("q"))],
    }

    def pick(type: str) -> Value:
        return draw(st.sampled_from(values[type]))

    def index(size: int) -> Value:  # any int, made to fit: also negative ones
        return p.op("sub", p.op("remainder", pick("int"), p.constant(2 * size)), p.constant(size))

    makers: dict[str, Callable[[], Value]] = {
        "unary": lambda: p.op(draw(st.sampled_from(UNARY)), pick("float")),
        "binary": lambda: p.op(draw(st.sampled_from(BINARY)), pick("float"), pick("float")),
        "int": lambda: p.op(draw(st.sampled_from(INT_BINARY)), pick("int"), pick("int")),
        "constant": lambda: p.op(draw(st.sampled_from(INT_CONSTANT)), pick("int"), p.constant(draw(st.integers(1, 9)))),
        "compare": lambda: p.op(draw(st.sampled_from(("lt", "le", "eq", "ne"))), pick("int"), pick("int")),
        "logic": lambda: p.op(draw(st.sampled_from(("and", "or", "xor"))), pick("bool"), p.op("not", pick("bool"))),
        "where": lambda: p.op("where", pick("bool"), pick("float"), pick("float")),
        "where_int": lambda: p.op("where", pick("bool"), pick("int"), pick("int")),
        "float": lambda: p.op("sin", p.convert(p.op("remainder", pick("int"), p.constant(100)), "float")),
        "truth": lambda: p.convert(pick("bool"), "float"),
        "line": lambda: p.gather(line, index(40)),
        "table": lambda: p.gather(table, index(3), index(50)),
        "order": lambda: p.gather(order, index(64)),
        "grid": lambda: p.gather(grid, index(20), index(70)),
    }
    for _ in range(draw(st.integers(1, 14))):
        value = makers[draw(st.sampled_from(sorted(makers)))]()
        values[value.type].append(value)
    return p.finish(p.op("add", p.op("tanh", values["float"][-1]), p.op("mul", pick("float"), p.constant(0.25))))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(code=random_program(), rows=st.integers(1, 20), cols=st.integers(1, 40), q0=st.integers(0, 50), k0=st.integers(0, 50))
def test_random_program(code: list[int], rows: int, cols: int, q0: int, k0: int) -> None:
    torch.manual_seed(0)
    captured = [
        torch.randn(40, dtype=torch.float64).requires_grad_(),
        torch.randn(50, 3, dtype=torch.float64).t().requires_grad_(),
        torch.randint(-99, 99, (64,), dtype=torch.int32),
        torch.rand(20, 70) < 0.5,
    ]
    check(code, captured, torch.randn(rows, cols, dtype=torch.float64), tolerance=1e-11, q0=q0, k0=k0)


# Captured tensors: dtypes, strides, indices.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["dense", "broadcast", "transposed", "flipped"])
def test_captured_tensor_of_any_dtype_and_strides(row: str, dtype: torch.dtype, form: str) -> None:
    bias = torch.randn(80, 80).to(dtype)
    bias = {"dense": bias, "broadcast": bias[:1].expand(80, 80), "transposed": bias.t(), "flipped": bias[::2].repeat_interleave(2, 0)}[form]
    program = ProgramBuilder()
    code = program.finish(program.op("add", program.op("score"), program.gather(program.captured("float", 2), program.op("q"), program.op("k"))))
    for cols in (32, 33):
        scores = torch.randn(20, cols)
        assert torch.equal(run(code, [bias], scores), scores + bias[Q0 : Q0 + 20, K0 : K0 + cols].float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_captured_integers_and_bools(row: str, dtype: torch.dtype) -> None:
    data = torch.randint(-(2**31), 2**31 - 1, (100,)).to(dtype)
    program = ProgramBuilder()
    type = "bool" if dtype == torch.bool else "int"
    found = program.gather(program.captured(type, 1), program.op("k"))
    code = program.finish(program.op("add", program.op("score"), program.convert(found, "float")))
    assert torch.equal(run(code, [data], torch.zeros(3, 50)), data[K0 : K0 + 50].float().expand(3, 50))


def gather_of_distance(size: int) -> list[int]:
    program = ProgramBuilder()
    index = program.op("sub", program.op("k"), program.op("q"))
    return program.finish(program.op("add", program.op("score"), program.gather(program.captured("float", 1), index)))


def test_negative_indices_count_from_the_end(row: str) -> None:
    table, scores = torch.randn(30), torch.zeros(10, 15)
    distance = (K0 + torch.arange(15))[None, :] - (Q0 + torch.arange(10))[:, None]
    assert distance.min() < 0
    assert torch.equal(run(gather_of_distance(30), [table], scores), table[distance])


@pytest.mark.parametrize("size, q0, k0", [(5, 0, 0), (5, 20, 0), (0, 0, 0), (20, 9, 30)])
def test_index_out_of_range_is_an_error_that_names_it(row: str, size: int, q0: int, k0: int) -> None:
    with pytest.raises(IndexError, match=rf"score_program_eval: code reads index -?\d+ of dimension 0 of captured tensor 0, which has size {size}"):
        run(gather_of_distance(size), [torch.randn(size)], torch.zeros(10, 16), q0, k0)
    if size == 0:
        return  # there is no gradient to add to
    with pytest.raises(IndexError, match="of captured tensor 0"):
        run_backward(gather_of_distance(size), [torch.randn(size).requires_grad_()], torch.zeros(10, 16), torch.ones(10, 16), q0, k0)


def test_index_behind_the_last_column_is_not_read(row: str) -> None:
    program = ProgramBuilder()
    ids = program.captured("float", 1)
    code = program.finish(program.op("add", program.op("score"), program.gather(ids, program.op("k"))))
    assert torch.equal(run(code, [torch.arange(17.0)], torch.zeros(2, 17), 0, 0), torch.arange(17.0).expand(2, 17))


def test_integer_division_by_zero_is_an_error(row: str) -> None:
    program = ProgramBuilder()
    quotient = program.op("floor_divide", program.op("q"), program.op("sub", program.op("k"), program.constant(K0 + 3)))
    code = program.finish(program.op("add", program.op("score"), program.convert(quotient, "float")))
    run(code, [], torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="divides an integer by zero"):
        run(code, [], torch.zeros(2, 4))


# What a program is, and what is refused.


def test_values_are_computed_at_their_rate() -> None:
    forward = _C.score_program_explain(code_of(alibi))["forward"].splitlines()
    assert [line.partition(":")[0] for line in forward] == ["head"] * 5 + ["diagonal"] * 3 + ["tile"]
    assert forward[-1] == "tile: score = add score, diagonal2"
    assert "tile: score = scaled_tanh score, 0.2, 5" in _C.score_program_explain(code_of(softcap))["forward"]
    assert _C.score_program_explain(code_of(causal))["forward"].splitlines()[-1] == "tile: score = where diagonal1, score, -inf"


def test_gradient_of_a_table_is_added_once_per_diagonal() -> None:
    backward = _C.score_program_explain(code_of(relative_table))["backward"].splitlines()
    assert "scatter_add" in backward[-1] and backward[-1].startswith("diagonal after")
    assert sum(line.startswith("tile:") for line in backward) == 1  # the sum; the gradient of the score is what it was


def test_identity_has_no_steps() -> None:
    program = ProgramBuilder()
    explained = _C.score_program_explain(program.finish(program.op("score")))
    assert explained == {"is_mask": False, "forward": "", "backward": ""}


SCORE, ADD, K_LEAF, GATHER = (_C.SCORE_OPS[name][0] for name in ("score", "add", "k", "gather"))


@pytest.mark.parametrize(
    "code, message",
    [
        ([], "ends before its version"),
        ([2, 0, 0, SCORE], "version must be 1, got 2"),
        ([1, 0, 0, 999], "value 0 has the unknown opcode 999"),
        ([1, 0, 0, _C.SCORE_OPS["gradient"][0]], "unknown opcode"),
        ([1, 0, 1, SCORE, ADD, 0, 1], r"value 1 \(add\) reads value 1, which is not before it"),
        ([1, 0, 2, SCORE, K_LEAF, ADD, 0, 1], r"value 2 \(add\) takes float, but value 1 is int"),
        ([1, 0, 0, K_LEAF], "the result must be float .* or bool .*, got int"),
        ([1, 0, 5, SCORE], "output must be one of its 1 values, got 5"),
        ([1, 0, 0, SCORE, ADD, 0], "ends before its operands"),
        ([1, 1, 0, 1, 1, K_LEAF, GATHER, 1, 0], "gathers from captured tensor 1 of 1"),
        ([1, 1, 0, 9, 0, SCORE], "rank of captured tensor 0 must be 0..8, got 9"),
        ([1, 1, 7, 1, 0, SCORE], "type of captured tensor 0 must be 0, 1 or 2, got 7"),
        ([1, 0, 0, _C.SCORE_OPS["int_const"][0], 2**40], "does not hold 1099511627776"),
        ([1, -1], "cannot have -1 captured tensors"),
    ],
)  # fmt: skip
def test_wrong_code_is_refused_with_its_place(code: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.score_program_explain(code)


def test_wrong_tensors_are_refused_with_their_names() -> None:
    code, scores = gather_of_distance(8), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="code must have 1 captured tensors, got 0"):
        _C.score_program_eval(code, [], 0, 0, 0, 0, scores)
    with pytest.raises(TypeError, match="captured tensor 0 of code must be a float tensor, got int64"):
        _C.score_program_eval(code, [torch.arange(8)], 0, 0, 0, 0, scores)
    with pytest.raises(ValueError, match=r"captured tensor 0 of code must have 1 dimensions, got shape \[2, 4\]"):
        _C.score_program_eval(code, [torch.zeros(2, 4)], 0, 0, 0, 0, scores)
    with pytest.raises(TypeError, match="scores must be float32 or float64, got float16"):
        _C.score_program_eval(code, [torch.zeros(8)], 0, 0, 0, 0, scores.half())
    with pytest.raises(ValueError, match=r"captured_gradients\[0\] must be contiguous float32 \[8\], got float32 \[7\]"):
        _C.score_program_backward(code, [torch.zeros(8)], 0, 0, 0, 0, scores, scores.clone(), [torch.zeros(7)])
    with pytest.raises(ValueError, match="code must be of a score_mod, got a mask"):
        _C.score_program_backward(code_of(causal), [], 0, 0, 0, 0, scores, scores.clone(), [])
    with pytest.raises(ValueError, match="code must be of a mask_mod, got a score_mod"):
        _C.block_classes(code_of(alibi), [], 1, 1, 8, 8, 4, 4, torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"classes must be contiguous uint8 \[1, 1, 2, 2\], got uint8 \[1, 1, 2, 1\]"):
        _C.block_classes(code_of(causal), [], 1, 1, 8, 8, 4, 4, torch.zeros(1, 1, 2, 1, dtype=torch.uint8))
    ids = torch.tensor([0, 2**31])
    with pytest.raises(ValueError, match="captured tensor 0 of mask_mod must hold integers of 32 bits, got 2147483648"):
        _C.block_classes(code_of(document), [ids], 1, 1, 2, 2, 1, 1, torch.zeros(1, 1, 2, 2, dtype=torch.uint8))


def test_builder_refuses_mixed_types() -> None:
    program = ProgramBuilder()
    with pytest.raises(TypeError, match=r"no score op add takes \(float, int\)"):
        program.op("add", program.op("score"), program.op("k"))
    with pytest.raises(TypeError, match="2 dimensions needs as many ints"):
        program.gather(program.captured("float", 2), program.op("k"))
    with pytest.raises(ValueError, match="type must be one of float, int, bool, got 'half'"):
        program.captured("half", 1)
