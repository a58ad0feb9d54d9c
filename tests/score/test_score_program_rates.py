# SPDX-License-Identifier: Apache-2.0
"""Score programs at every rate: programs of users, random programs, captured tensors of any dtype, strides and index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_programs import (
    EPSILON,
    FLOATS,
    K0,
    Q0,
    check,
    code_of,
    gather_of_distance,
    relative_table,
    run,
    run_backward,
    shuffled,
    tensors,
)

from lowbit.score.program import ProgramBuilder, Value


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 64), (5, 100), (33, 16)], ids=str)
@pytest.mark.parametrize("build", FLOATS, ids=lambda build: build.__name__)
def test_program_forward_and_backward(score_row: str, build: Callable[[ProgramBuilder], Value], shape: tuple[int, int], dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("captured_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["dense", "broadcast", "transposed", "flipped"])
def test_captured_tensor_of_any_dtype_and_strides(score_row: str, captured_dtype: torch.dtype, form: str, subtests: pytest.Subtests) -> None:
    bias = torch.randn(80, 80).to(captured_dtype)
    bias = {"dense": bias, "broadcast": bias[:1].expand(80, 80), "transposed": bias.t(), "flipped": bias[::2].repeat_interleave(2, 0)}[form]
    program = ProgramBuilder()
    code = program.finish(program.op("add", program.op("score"), program.gather(program.captured("float", 2), program.op("q"), program.op("k"))))
    for cols in (32, 33):
        with subtests.test(cols=cols):
            scores = torch.randn(20, cols)
            assert torch.equal(run(code, [bias], scores), scores + bias[Q0 : Q0 + 20, K0 : K0 + cols].float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_captured_integers_and_bools(score_row: str, dtype: torch.dtype) -> None:
    data = torch.randint(-(2**31), 2**31 - 1, (100,)).to(dtype)
    program = ProgramBuilder()
    type = "bool" if dtype == torch.bool else "int"
    found = program.gather(program.captured(type, 1), program.op("k"))
    code = program.finish(program.op("add", program.op("score"), program.convert(found, "float")))
    assert torch.equal(run(code, [data], torch.zeros(3, 50)), data[K0 : K0 + 50].float().expand(3, 50))


def test_negative_indices_count_from_the_end(score_row: str) -> None:
    table, scores = torch.randn(30), torch.zeros(10, 15)
    distance = (K0 + torch.arange(15))[None, :] - (Q0 + torch.arange(10))[:, None]
    assert distance.min() < 0
    assert torch.equal(run(gather_of_distance(30), [table], scores), table[distance])


@pytest.mark.parametrize("size, q0, k0", [(5, 0, 0), (5, 20, 0), (0, 0, 0), (20, 9, 30)])
def test_index_out_of_range_is_an_error_that_names_it(score_row: str, size: int, q0: int, k0: int) -> None:
    with pytest.raises(IndexError, match=rf"score_program_eval: code reads index -?\d+ of dimension 0 of captured tensor 0, which has size {size}"):
        run(gather_of_distance(size), [torch.randn(size)], torch.zeros(10, 16), q0, k0)
    if size == 0:
        return  # there is no gradient to add to
    with pytest.raises(IndexError, match="of captured tensor 0"):
        run_backward(gather_of_distance(size), [torch.randn(size).requires_grad_()], torch.zeros(10, 16), torch.ones(10, 16), q0, k0)


def test_index_behind_the_last_column_is_not_read(score_row: str) -> None:
    program = ProgramBuilder()
    ids = program.captured("float", 1)
    code = program.finish(program.op("add", program.op("score"), program.gather(ids, program.op("k"))))
    assert torch.equal(run(code, [torch.arange(17.0)], torch.zeros(2, 17), 0, 0), torch.arange(17.0).expand(2, 17))


def test_integer_division_by_zero_is_an_error(score_row: str) -> None:
    program = ProgramBuilder()
    quotient = program.op("floor_divide", program.op("q"), program.op("sub", program.op("k"), program.constant(K0 + 3)))
    code = program.finish(program.op("add", program.op("score"), program.convert(quotient, "float")))
    run(code, [], torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="divides an integer by zero"):
        run(code, [], torch.zeros(2, 4))
