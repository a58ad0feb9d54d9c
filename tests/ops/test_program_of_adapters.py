# SPDX-License-Identifier: Apache-2.0
"""What adapters add to products in programs: every row beside float64, in parts too, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import _C, testing
from lowbit.ops.program import NONE, LowRank, Program
from lowbit.ops.run_program import run_program
from lowbit.reference import linear as reference
from lowbit.testing import LinearCase, assert_within, budget, cached_data

CASES = testing.linear_cases(rounds=1)
RANKS = (1, 4, 16, 21, 64)


def panels_of(up: Tensor) -> Tensor:
    """``[n, r]`` as the op reads it: 16 outputs side by side."""
    padded = torch.nn.functional.pad(up, (0, 0, 0, -len(up) % 16))
    return padded.view(-1, 16, up.shape[1]).transpose(1, 2).contiguous()


def run(case: LinearCase, inner: Tensor, up: Tensor, parts: Any, row: str | None = None) -> Tensor:
    data, program = cached_data(case), Program()
    inputs = [tensor for tensor in (data.x, inner, data.mul, data.add) if tensor is not None]
    mul = NONE if data.mul is None else Program.input(2)
    add = NONE if data.add is None else Program.input(len(inputs) - 1)
    weight, bias = program.constant(data.packed), program.constant(data.bias)
    low_rank = LowRank(Program.input(1), program.constant(up), parts)
    activation = _C.ACTIVATIONS[case.activation]
    program.linear(Program.input(0), weight, case.op_args, bias, activation, mul, add, low_rank=low_rank)
    previous = _C.force_kernel(row)
    try:
        return run_program(program.code, program.constants, [], inputs, [])
    finally:
        _C.force_kernel(previous)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(case: LinearCase, inner: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64 and its budget; inner and up are those of all outputs."""
    data = cached_data(case)
    decoded = testing.decode_weight(data.packed, case.n, case.k, case.format, case.group_size, case.mapping)
    result = reference.product(data.x, decoded, case.x_format) + inner.double() @ up.double().T
    magnitude = reference.magnitude(data.x, decoded, case.x_format) + inner.double().abs() @ up.double().abs().T
    if data.bias is not None:
        result, magnitude = result + data.bias.double(), magnitude + data.bias.double().abs()
    mul, add = (None if tensor is None else tensor.double() for tensor in (data.mul, data.add))
    allowed = budget(
        case.dtype, case.k + up.shape[1], magnitude=magnitude, linear_result=result, post=case, mul=mul, add=add
    )
    wanted = reference.ACTIVATIONS[case.activation](result)
    wanted = wanted if mul is None else wanted * mul
    return (wanted if add is None else wanted + add), allowed


@pytest.mark.core
def test_a_row_adds_what_the_adapter_gives(kernel: str, subtests: pytest.Subtests) -> None:
    if kernel.endswith("_onednn"):
        with pytest.raises(NotImplementedError, match="an adapter's product of low rank"):
            run(LinearCase(3, 48, 64, format="float32"), torch.zeros(3, 4), torch.zeros(3, 4, 16), ((48, 0),), kernel)
        return
    cases = [case for case in CASES if testing.serves(kernel, case)]
    assert cases, f"no case reaches row {kernel}"
    for i, case in enumerate(cases):
        rank, dtype = RANKS[i % len(RANKS)], (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        inner, up = random(i, case.m, rank).to(cached_data(case).x.dtype), (random(i + 1, case.n, rank) * 2).to(dtype)
        with subtests.test(case=str(case), rank=rank, dtype=str(dtype)):
            got = run(case, inner, panels_of(up), ((case.n, 0),), kernel)
            assert _C.last_kernel("linear") == kernel
            assert_within(got, *expected(case, inner, up), f"{kernel} {case} rank {rank}")


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("x_format", ["float", "int8_group"])
def test_parts_of_the_outputs_have_their_own_columns(m: int, x_format: str) -> None:
    """As of q, k and v in one product: k has no adapter here, v shares the columns of q, and one ends within a panel."""
    case = LinearCase(m, 91, 72, "float32", "int4", 32, "symmetric", x_format, activation="silu", mul=True)
    inner, up = random(0, m, 11), random(1, 91, 4)
    parts = ((32, 6), (48, -1), (80, 6), (91, 0))
    wide, begin = torch.zeros(91, 11), 0
    for end, column in parts:
        if column >= 0:
            wide[begin:end, column : column + 4] = up[begin:end]
        begin = end
    assert_within(run(case, inner, panels_of(up), parts), *expected(case, inner, wide))


def test_columns_of_a_result_and_threads() -> None:
    """A product into columns of another, and the same bits with any number of threads."""
    case = LinearCase(1, 64, 96, "float32", "int8")
    data, inner, up = cached_data(case), random(0, 1, 16), random(1, 64, 16)
    program = Program()
    whole = program.columns(Program.input(0), 80)
    weight, low_rank = program.constant(data.packed), LowRank(Program.input(1), program.constant(panels_of(up)), ((64, 0),))
    program.linear(Program.input(0), weight, case.op_args, into=whole, low_rank=low_rank)
    program.linear(Program.input(0), program.constant(data.packed[:1]), (16, *case.op_args[1:]), into=whole, first_column=64)
    program.scaled_add(whole)
    results, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(run_program(program.code, program.constants, [], [data.x, inner], []))
    torch.set_num_threads(before)
    assert results[0].equal(results[1])
    assert results[0][:, :64].equal(run(case, inner, panels_of(up), ((64, 0),)))


CASE = LinearCase(3, 48, 64, "float32", "int8")
REFUSED: dict[str, tuple[type[Exception], Any, Any, Any, str]] = {
    "inner of another dtype": (TypeError, torch.zeros(3, 4).bfloat16(), torch.zeros(3, 4, 16), ((48, 0),), "inner must have the dtype of x, got bfloat16 and float32"),
    "inner of other rows": (ValueError, torch.zeros(2, 4), torch.zeros(3, 4, 16), ((48, 0),), "inner must have the 3 rows of x"),
    "up of other panels": (ValueError, torch.zeros(3, 4), torch.zeros(2, 4, 16), ((48, 0),), r"up must have shape \[3, rank, 16\] for n=48, got \[2, 4, 16\]"),
    "up of integers": (TypeError, torch.zeros(3, 4), torch.zeros(3, 4, 16).int(), ((48, 0),), "up"),
    "no parts": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), (), "must be 1 to 4 and end with output 48, got 0"),
    "too many parts": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((16, 0),) * 4 + ((48, 0),), "must be 1 to 4 and end with output 48, got 5"),
    "parts that end early": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((32, 0),), "end with output 48, got 1 that end with 32"),
    "parts that fall": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((32, 0), (16, 0), (48, 0)), "must rise by multiples of 16, got 16 behind 32"),
    "parts within a panel": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((17, 0), (48, 0)), "must rise by multiples of 16, got 17 behind 0"),
    "columns that inner lacks": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((48, 1),), "must read 4 of the 4 columns of inner, or -1 for none, got the first as 1"),
    "columns before the first": (ValueError, torch.zeros(3, 4), torch.zeros(3, 4, 16), ((48, -2),), "got the first as -2"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    error, inner, up, parts, text = REFUSED[what]
    with pytest.raises(error, match=text):
        run(CASE, inner, up, parts)
