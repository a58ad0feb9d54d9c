# SPDX-License-Identifier: Apache-2.0
"""Score programs: every op against torch, forward and backward, on every row; what is refused, and how."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from score_programs import (
    EPSILON,
    FLOAT_ENDS,
    INT_ENDS,
    K0,
    NEVER_ZERO,
    POSITIVE,
    Q0,
    B,
    H,
    alibi,
    causal,
    check,
    close,
    code_of,
    document,
    gather_of_distance,
    interpret,
    operands,
    relative_table,
    run,
    softcap,
)
from tests import internals

import lowbit
from lowbit import _C, testing
from lowbit.reference.score_program import OPS
from lowbit.score.program import TYPES, ProgramBuilder

INTERNAL = {"gradient", "k_minus_q", "scatter_add", "sum", "copy", "multiply_add", "scaled_tanh"}
LEAVES = {"score", "b", "h", "q", "k", "float_const", "int_const", "bool_const", "gather"}


def test_every_op_has_a_test() -> None:
    assert set(OPS) | INTERNAL | LEAVES == set(_C.SCORE_OPS)


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_is_that_of_torch(score_row: str, name: str) -> None:
    check_op(name, torch.float32)


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_is_that_of_torch_in_float64(name: str) -> None:
    check_op(name, torch.float64)
    assert _C.last_kernel("score_program").startswith("score_program_float64_scalar")


def test_float64_is_the_scalar_rows(subtests: pytest.Subtests) -> None:
    program, values, captured = operands("exp", torch.float64)
    code = program.finish(program.op("exp", *values))
    for row in testing.rows("score_program"):
        with subtests.test(row=row["name"]):
            if row["available"] and "_float64_" not in str(row["name"]):
                with lowbit.force_kernel(str(row["name"])), pytest.raises(NotImplementedError, match="scores are float64"):
                    run(code, captured, torch.randn(19, 33, dtype=torch.float64))


def check_op(name: str, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("name", sorted(n for n in OPS if _C.SCORE_OPS[n][1] in ("f>f", "ff>f") and n not in ("pow", "remainder", "fmod", "floor_divide")))
def test_op_takes_infinities_and_nan_as_torch_does(score_row: str, name: str) -> None:
    program = ProgramBuilder()
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -3e38, 88.9, -104.5])
    operands = [program.op("score")]
    if _C.SCORE_OPS[name][1] == "ff>f":
        operands.append(program.gather(program.captured("float", 1), program.op("q")))
    code = program.finish(program.op(name, *operands))
    scores = special.expand(len(special), -1).clone()
    got = run(code, [special][: len(operands) - 1], scores, q0=0)
    wanted = OPS[name](scores, special[:, None]) if len(operands) == 2 else OPS[name](scores.double()).float()
    if name.startswith("to_"):
        wanted = scores.to(getattr(torch, name.removeprefix("to_"))).float()
    if name in ("sin", "cos", "tan"):  # of 3e38: any library's own reduction
        got[:, 8:10] = wanted[:, 8:10] = 0
    if name == "sign":
        got[:, 6] = wanted[:, 6] = 0
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
    close(got, wanted, 4 * EPSILON[torch.float32], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", sorted(n for n in OPS if not n.startswith("to_")))
def test_op_and_derivative_are_torchs_at_the_ends(score_row: str, name: str, dtype: torch.dtype) -> None:
    """Every pair (triple) of infinities, nan, zeros, the largest and the smallest numbers."""
    types = _C.SCORE_OPS[name][1].partition(">")[0]
    choices = {"f": torch.tensor(FLOAT_ENDS[dtype], dtype=dtype), "i": torch.tensor(INT_ENDS, dtype=torch.int32), "b": torch.tensor([False, True])}
    places = torch.meshgrid(*(torch.arange(len(choices[letter])) for letter in types), indexing="ij")
    columns = [choices[letter][place.reshape(-1)] for letter, place in zip(types, places, strict=True)]
    keep = torch.ones_like(columns[0], dtype=torch.bool)
    if name in NEVER_ZERO and name.endswith("int"):  # torch divides the least integer by -1 with a signal
        keep = (columns[1] != 0) & ~((columns[0] == INT_ENDS[-2]) & (columns[1] == -1))
    if name in ("fmod", "remainder"):  # torch's vectors give nan where the quotient leaves the range of an integer
        quotient = (columns[0].double() / columns[1].double()).abs()
        keep = ~((quotient > 1e6) & quotient.isfinite()) & ~(quotient.isinf() & columns[0].isfinite() & (columns[1] != 0))
    if name in ("sin", "cos", "tan"):  # any library's own reduction
        keep = ~(columns[0].abs() > 1e6) | columns[0].isinf()
    columns = [column[keep] for column in columns]
    program = ProgramBuilder()
    k = program.op("k")
    operands = [program.gather(program.captured(next(t for t in TYPES if t[0] == letter), 1), k) for letter in types]
    result = program.op(name, *operands)
    code = program.finish(program.convert(result, "float"))
    scores = torch.zeros(1, len(columns[0]), dtype=dtype)
    leaves = [column.clone().requires_grad_() if column.is_floating_point() else column for column in columns]
    wanted = OPS[name](*leaves)
    tolerance = {"pow": 400, "exp": 30, "exp2": 30}.get(name, 8) * EPSILON[dtype]
    close(run(code, columns, scores, k0=0)[0], wanted.detach().to(dtype), tolerance, name)
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    if result.type != "float" or not floats or not wanted.requires_grad:
        return
    sums = [torch.zeros(len(column), dtype=dtype) if column.is_floating_point() else None for column in columns]
    internals.score_program_backward(code, columns, B, H, 0, 0, scores, torch.ones_like(scores), sums)
    exact = torch.autograd.grad(wanted, floats, torch.ones_like(wanted), allow_unused=True)
    for got, want in zip((s for s in sums if s is not None), exact, strict=True):
        close(got, torch.zeros_like(got) if want is None else want, 4 * tolerance, f"derivative of {name}")


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_a_result_that_is_a_gather(score_row: str, dtype: torch.dtype) -> None:
    """In every position of the table, also where the tensor could stand in for a register: the memory of the scores is none."""
    for rows, cols in ((16, 16), (16, 128), (19, 33), (3, 256)):
        for build in (
            lambda p: p.gather(p.captured("float", 2), p.op("q"), p.op("k")),
            lambda p: p.gather(p.captured("float", 2), p.op("sub", p.constant(Q0 + 18), p.op("q")), p.op("k")),
        ):
            p = ProgramBuilder()
            table = torch.randn(Q0 + 19, K0 + 256, dtype=dtype, requires_grad=True)
            check(p.finish(build(p)), [table], torch.randn(rows, cols, dtype=dtype), tolerance=4 * EPSILON[dtype])


@pytest.mark.parametrize("inner", [1 / 50, 0.7, -3.0, 2.0**-12, 3e5, 1e-30, 0.0], ids=str)
@pytest.mark.parametrize("rate", ["constant", "row", "tile"])
def test_a_soft_cap_keeps_its_relative_error_and_its_cap(score_row: str, inner: float, rate: str) -> None:
    """outer * tanh(inner * score), whose factors go into coefficients where they are the same for all rows and their powers are floats."""
    p = ProgramBuilder()
    outer = 30.0
    factor = {"constant": lambda: p.constant(inner), "row": lambda: p.gather(p.captured("float", 1), p.op("q"))}.get(rate)
    factor = factor() if factor else p.gather(p.captured("float", 2), p.op("q"), p.op("k"))
    code = p.finish(p.op("mul", p.op("tanh", p.op("mul", p.op("score"), factor)), p.constant(outer)))
    assert "scaled_tanh" in _C.score_program_explain(code)["forward"]
    captured = {"constant": [], "row": [torch.full((Q0 + 19,), inner)], "tile": [torch.full((Q0 + 19, K0 + 64), inner)]}[rate]
    argument = torch.cat([torch.logspace(-20, 1.2, 19 * 64 - 6), torch.tensor([0.0, -0.0, 1e-3, math.inf, -math.inf, math.nan])]).view(19, 64)
    scores = argument / inner if inner else argument
    found, wanted = run(code, captured, scores), outer * torch.tanh(scores.double() * torch.tensor(inner).double())
    assert torch.equal(found.isnan(), wanted.isnan())
    error = (found.double() - wanted).abs() / wanted.abs().clamp(min=outer * 1e-37)
    assert error[~wanted.isnan()].max() < 7e-7
    assert found[~wanted.isnan()].abs().max() <= outer


# Programs that are valid, and those that are refused.


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
        internals.score_program_eval(code, [], 0, 0, 0, 0, scores)
    with pytest.raises(TypeError, match="captured tensor 0 of code must be a float tensor, got int64"):
        internals.score_program_eval(code, [torch.arange(8)], 0, 0, 0, 0, scores)
    with pytest.raises(ValueError, match=r"captured tensor 0 of code must have 1 dimensions, got shape \[2, 4\]"):
        internals.score_program_eval(code, [torch.zeros(2, 4)], 0, 0, 0, 0, scores)
    with pytest.raises(TypeError, match="scores must be float32 or float64, got float16"):
        internals.score_program_eval(code, [torch.zeros(8)], 0, 0, 0, 0, scores.half())
    with pytest.raises(ValueError, match=r"captured_gradients\[0\] must be contiguous float32 \[8\], got float32 \[7\]"):
        internals.score_program_backward(code, [torch.zeros(8)], 0, 0, 0, 0, scores, scores.clone(), [torch.zeros(7)])
    with pytest.raises(ValueError, match="code must be of a score_mod, got a mask"):
        internals.score_program_backward(code_of(causal), [], 0, 0, 0, 0, scores, scores.clone(), [])
    with pytest.raises(ValueError, match="code must be of a mask_mod, got a score_mod"):
        _C.block_classes(code_of(alibi), [], 1, 1, 8, 8, 4, 4, torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"classes must have shape \[1, 1, 2, 2\], got \[1, 1, 2, 1\]"):
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


def test_the_page_names_every_op_and_the_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ops" / "score_programs.md").read_text()
    for name in {*OPS, "gather"}:
        assert f"`{name}`" in page, name
    for info in testing.rows("score_program"):
        name = str(info["name"]).removesuffix(f"_{info['backend']}")
        assert f"`{name}_<isa>`" in page and f"`{info['backend']}`" in page, info
