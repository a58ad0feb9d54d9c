# SPDX-License-Identifier: Apache-2.0
"""Steps of recurrent layers in programs: bit for bit what the separate calls give, of columns of one product and with
states in place; gates beside float64; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings import forced
from torch import Tensor
from torch.nn import functional

import lowbit
from lowbit import testing
from lowbit.ops.program import Program
from lowbit.ops.run_program import KeptProgram, run_program

MISSING = torch.empty(0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY_HEADS, DK, HEADS, DV = 2, 16, 4, 24
QKV = 2 * KEY_HEADS * DK + HEADS * DV
INPUT = Program.input(0)
ROWS = [str(row["name"]) for row in testing.rows("gated_delta_rule") if row["available"]]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ran(program: Program, states: list[Tensor], *inputs: Tensor) -> Tensor:
    return run_program(program.code, program.constants, states, list(inputs), [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 200])
@pytest.mark.parametrize("taps, kept", [(4, 4), (3, 2), (8, 8)])
def test_causal_conv1d(dtype: torch.dtype, length: int, taps: int, kept: int) -> None:
    """Of columns in the middle of x, with the state written where it was read. 200 tokens are several parts."""
    channels = 40
    x, state = random(2, length, 70, dtype=dtype), random(2, channels, kept, dtype=dtype, seed=2)
    weight, bias = random(channels, taps, seed=3), random(channels, seed=4)
    for silu, of in ((True, bias), (False, None)):
        program, held = Program(), state.clone()
        program.causal_conv1d(
            INPUT, program.constant(weight), Program.state(0), program.constant(of), column=13, silu=silu
        )
        got = ran(program, [held], x)
        activation = "silu" if silu else None
        wanted, after = lowbit.causal_conv1d(x[..., 13:53], weight, of, state, activation=activation)
        assert torch.equal(got, wanted) and torch.equal(held, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 30])
def test_gated_delta_rule(dtype: torch.dtype, length: int) -> None:
    x, state = random(2, length, QKV + 20, dtype=dtype), random(2, HEADS, DK, DV, seed=2)
    g, beta = -random(2, length, 9, seed=3).abs(), random(2, length, 7, seed=4).sigmoid()
    program, held = Program(), state.clone()
    sizes = KEY_HEADS, DK, HEADS, DV
    program.gated_delta_rule(
        INPUT, Program.input(1), Program.input(2), Program.state(0), sizes, 0.3, True, g_column=2, beta_column=3
    )
    got = ran(program, [held], x, g, beta)
    q, k, v = x[..., :QKV].split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV], dim=-1)
    q, k = (part.unflatten(-1, (KEY_HEADS, DK)) for part in (q, k))
    given = q, k, v.unflatten(-1, (HEADS, DV)), g[..., 2:6], beta[..., 3:7], state
    wanted, after = lowbit.gated_delta_rule(*given, l2norm=True, scale=0.3)
    assert torch.equal(got, wanted.flatten(2)) and torch.equal(held, after)


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_gates_are_made_in_the_row(row: str, dtype: torch.dtype, length: int) -> None:
    """Beside gates in float64: g and beta have a few float32 roundings, and far ones neither overflow nor become nan."""
    x = random(2, length, QKV, dtype=dtype) / 4
    b, a = 3 * random(2, length, HEADS, dtype=dtype, seed=3), 20 * random(2, length, HEADS, dtype=dtype, seed=4)
    a_log, bias = random(HEADS, seed=5), random(HEADS, seed=6).bfloat16()
    a[:, 0, 0], b[:, 0, 0], b[:, 0, 1] = 3e4, 6e4, -6e4
    program, state = Program(), torch.zeros(2, HEADS, DK, DV)
    gates = [program.constant(a_log), program.constant(bias)]
    program.gated_delta_rule(
        INPUT, Program.input(1), Program.input(2), Program.state(0), (KEY_HEADS, DK, HEADS, DV), 1.0, True, *gates,
        beta_scale=2.0,
    )  # fmt: skip
    with forced(row):
        got = ran(program, [state], x, a, b)
    g = -a_log.double().exp() * functional.softplus(a.double() + bias.double())
    q, k, v = x.split([KEY_HEADS * DK, KEY_HEADS * DK, HEADS * DV], dim=-1)
    q, k = (part.unflatten(-1, (KEY_HEADS, DK)) for part in (q, k))
    given = q, k, v.unflatten(-1, (HEADS, DV)), g.float(), 2 * b.double().sigmoid().float()
    with forced(row):
        wanted, after = lowbit.gated_delta_rule(*given, l2norm=True, scale=1.0)
    bound = 1e-5 + testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(got, wanted.flatten(2), rtol=0, atol=bound * float(wanted.abs().max()))
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5 * float(after.abs().max()))


@pytest.mark.core
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_decays_per_channel_are_made_in_the_row(row: str, dtype: torch.dtype, length: int) -> None:
    """Beside decays in float64, of columns in the middle of g; 21 channels are no whole vectors."""
    dk, heads, dv = 21, 3, 24
    x = random(2, length, 2 * heads * dk + heads * dv, dtype=dtype) / 4
    g, b = 10 * random(2, length, heads * dk + 9, dtype=dtype, seed=3), 3 * random(2, length, heads, dtype=dtype, seed=4)
    a_log, bias = random(heads, seed=5), random(heads * dk, seed=6).bfloat16()
    g[:, 0, 5], g[:, 0, 6] = 3e4, -3e4
    for of in (bias, None):
        program, state = Program(), random(2, heads, dk, dv, seed=7)
        before = state.clone()
        program.gated_delta_rule(
            INPUT, Program.input(1), Program.input(2), Program.state(0), (heads, dk, heads, dv), 1.0, True,
            program.constant(a_log), program.constant(of), g_column=4, per_channel=True,
        )  # fmt: skip
        with forced(row):
            got = ran(program, [state], x, g, b)
        projected = g[..., 4 : 4 + heads * dk].double() + (0 if of is None else of.double())
        decays = -a_log.double().exp()[:, None] * functional.softplus(projected).unflatten(-1, (heads, dk))
        q, k, v = x.split([heads * dk, heads * dk, heads * dv], dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
        with forced(row):
            wanted, after = lowbit.gated_delta_rule(
                q, k, v, decays.float(), b.double().sigmoid().float(), before, l2norm=True, scale=1.0
            )
        bound = 1e-5 + testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
        torch.testing.assert_close(got, wanted.flatten(2), rtol=0, atol=bound * float(wanted.abs().max()))
        torch.testing.assert_close(state, after, rtol=0, atol=1e-5 * float(after.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("s", [5, 16])
def test_selective_scan(dtype: torch.dtype, length: int, s: int) -> None:
    """With and without a gate, of B, C and a gate that are columns of what one product made."""
    channels = 40
    x, dt = random(2, length, channels, dtype=dtype), random(2, length, channels, dtype=dtype, seed=2)
    bc, z = random(2, length, 2 * s + 3, dtype=dtype, seed=3), random(2, length, 2 * channels, dtype=dtype, seed=4)
    a, d, bias = -random(channels, s).abs(), random(channels, seed=5), random(channels, seed=6)
    state = random(2, channels, s, seed=7)
    for gated in (True, False):
        program, held = Program(), state.clone()
        program.selective_scan(
            INPUT, Program.input(1), program.constant(a), (Program.input(2), 3), (Program.input(2), 3 + s),
            Program.state(0), s, (0.1, 0.9), program.constant(d), program.constant(bias),
            *([(Program.input(3), channels)] if gated else []), softplus=True,
        )  # fmt: skip
        got = ran(program, [held], x, dt, bc, *([z] if gated else []))
        b, c = bc[..., 3 : 3 + s], bc[..., 3 + s :]
        wanted, after = lowbit.selective_scan(
            x, dt, a, b, c, d, z[..., channels:] if gated else None, dt_bias=bias, softplus=True, dt_limit=(0.1, 0.9),
            state=state,
        )  # fmt: skip
        assert torch.equal(got, wanted) and torch.equal(held, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("result", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False], ids=["add of the result", "add of x"])
def test_a_sum_of_another_dtype(dtype: torch.dtype, result: torch.dtype, wide: bool) -> None:
    x, add = random(2, 3, 37, dtype=dtype), random(2, 3, 37, dtype=result if wide else dtype, seed=2)
    program = Program()
    program.scaled_add(INPUT, Program.input(1), scale=0.5, dtype=result)
    got = ran(program, [], x, add)
    wanted = (0.5 * x.double() + add.double()).float().to(result)  # exact in float32 but for its one rounding
    assert got.dtype is result
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(result).eps, atol=1e-7)
    alone = Program()
    alone.scaled_add(INPUT, dtype=result)
    assert torch.equal(ran(alone, [], x), x.to(result))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 30])
def test_ssd(dtype: torch.dtype, length: int) -> None:
    heads, p, groups, s = 4, 20, 2, 24
    x, dt = random(2, length, heads * p + 2 * groups * s + 5, dtype=dtype), random(2, length, 9, dtype=dtype, seed=2)
    a, d, bias, state = -random(heads).abs(), random(heads, seed=3), random(heads, seed=4), random(2, heads, p, s, seed=5)
    program, held = Program(), state.clone()
    constants = [program.constant(each) for each in (a, d, bias)]
    program.ssd(
        INPUT, Program.input(1), constants[0], Program.state(0), (heads, p, groups, s), (0.1, 0.9), *constants[1:],
        softplus=True, dt_column=3,
    )  # fmt: skip
    got = ran(program, [held], x, dt)
    of_x, b, c = x[..., :-5].split([heads * p, groups * s, groups * s], dim=-1)
    b, c = (part.unflatten(-1, (groups, s)) for part in (b, c))
    given = of_x.unflatten(-1, (heads, p)), dt[..., 3:7], a, b, c, d
    wanted, after = lowbit.ssd(*given, dt_bias=bias, softplus=True, dt_limit=(0.1, 0.9), state=state)
    assert torch.equal(got, wanted.flatten(2)) and torch.equal(held, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation, gate_first, size", [("silu", False, 24), ("sigmoid", True, 8)])
def test_gated_rms_norm(dtype: torch.dtype, activation: str, gate_first: bool, size: int) -> None:
    x, gate, weight = random(2, 3, 72, dtype=dtype), random(2, 3, 90, dtype=dtype, seed=2), random(24, seed=3)
    program = Program()
    options = activation == "sigmoid", gate_first
    program.gated_rms_norm(INPUT, Program.input(1), program.constant(weight), 1e-5, size, *options, gate_column=11)
    wanted = lowbit.gated_rms_norm(
        x.unflatten(-1, (3, 24)), gate[..., 11:83].unflatten(-1, (3, 24)), weight, 1e-5, group_size=size,
        activation=activation, gate_first=gate_first,
    )  # fmt: skip
    assert torch.equal(ran(program, [], x, gate), wanted.flatten(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 32, 40])
def test_heads_are_gated(dtype: torch.dtype, size: int) -> None:
    """Of queries and gates that lie in turns, as the projection of Qwen3.5's queries makes them."""
    x, gate = random(2, 3, 4 * size, dtype=dtype), random(2, 3, 9 * size, dtype=dtype, seed=2)
    program = Program()
    program.gated_heads(INPUT, Program.input(1), size, column=size, step=2 * size)
    gates = gate[..., : 8 * size].unflatten(-1, (4, 2, size))[..., 1, :].double().sigmoid()
    wanted = (x.double().unflatten(-1, (4, size)) * gates).flatten(2)
    bound = 8 * testing.ROUNDOFF["float32"] + testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(ran(program, [], x, gate).double(), wanted, rtol=bound, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_of_columns_gates_a_result(dtype: torch.dtype) -> None:
    x, gate = random(2, 3, 40, dtype=dtype), random(2, 3, 70, dtype=dtype, seed=2)
    program = Program()
    program.gated_heads(INPUT, Program.input(1), 40, column=7, step=40, silu=True)
    wanted = x.double() * functional.silu(gate[..., 7:47].double())
    bound = 10 * testing.ROUNDOFF["float32"] + testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(ran(program, [], x, gate).double(), wanted, rtol=bound, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 300])
def test_columns_are_scaled_in_place(dtype: torch.dtype, length: int) -> None:
    x, factors = random(2, length, 37, dtype=dtype), random(37, seed=2)
    program = Program()
    y = program.scaled_add(INPUT)
    program.scale_columns(y, program.constant(factors))
    before = x.clone()
    assert torch.equal(ran(program, [], x), (x * factors).to(dtype)) and torch.equal(x, before)
    kept = KeptProgram(program)
    for given in (x, random(1, 2, 37, dtype=dtype), x):
        assert torch.equal(kept([], [given], []), (given * factors).to(dtype))


def masked(mask: Tensor, x: Tensor) -> Tensor:
    program = Program()
    y = program.scaled_add(INPUT)
    program.mask_rows(y, Program.input(1))
    return ran(program, [], x, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_masked(dtype: torch.dtype) -> None:
    x, mask = random(2, 5, 33, dtype=dtype), torch.tensor([[0.0, 0, 1, 1, 1], [1, 1, 1, 0, 1]], dtype=dtype)[..., None]
    before = x.clone()
    assert torch.equal(masked(mask, x), x * mask) and torch.equal(masked(MISSING, x), x) and torch.equal(x, before)


def test_a_plan_serves_calls_with_a_mask_and_without() -> None:
    program = Program()
    program.mask_rows(program.scaled_add(INPUT), Program.input(1))
    kept, x, mask = KeptProgram(program), random(2, 5, 33), torch.tensor([0.0, 1, 1, 0, 1]).expand(2, 5)[..., None].contiguous()
    for given, wanted in ((MISSING, x), (mask, x * mask), (MISSING, x), (mask, x * mask)):
        assert torch.equal(kept([], [x, given], []), wanted)
    with pytest.raises(ValueError, match="mask_rows: gate must have one element for each row of x"):
        kept([], [x, mask[:, :3]], [])


def conv(program: Program, column: int = 0) -> None:
    program.causal_conv1d(INPUT, program.constant(random(40, 4)), Program.state(0), column=column)


def rule(program: Program, **more: Any) -> None:
    sizes = KEY_HEADS, DK, HEADS, DV
    program.gated_delta_rule(INPUT, Program.input(1), Program.input(1), Program.state(0), sizes, 1.0, **more)


def with_gates(program: Program, heads: int = HEADS) -> None:
    rule(program, a_log=program.constant(random(heads)))


GATES = random(2, 3, HEADS)
STATE = torch.zeros(2, HEADS, DK, DV)
REFUSED: dict[str, tuple[Callable[[Program], None], list[Tensor], list[Tensor], type[Exception], str]] = {
    "columns": (
        lambda program: conv(program, 31), [torch.zeros(2, 40, 4)], [random(2, 3, 70)], ValueError,
        r"step 0: causal_conv1d: x must have shape \[B, T, n\] with 1 times 40 columns from 31 on, got \[2, 3, 70\]",
    ),
    "a state that is no state": (conv, [torch.zeros(2, 40, 9)], [random(2, 3, 70)], ValueError, "state must have shape"),
    "a strided state": (
        conv, [torch.zeros(2, 4, 40).mT], [random(2, 3, 70)], ValueError, "causal_conv1d: state must be contiguous",
    ),
    "a state of another dtype": (
        conv, [torch.zeros(2, 40, 4).bfloat16()], [random(2, 3, 70)], TypeError, "state must be float32",
    ),
    "another state": (rule, [STATE[..., 1:].clone(memory_format=torch.contiguous_format)], [random(2, 3, QKV), -GATES.abs()], ValueError, "state must have shape"),
    "g": (rule, [STATE], [random(2, 3, QKV), GATES], ValueError, "g must be finite and at most 0"),
    "projected g": (with_gates, [STATE], [random(2, 3, QKV), GATES / 0], ValueError, "g must be finite, got"),
    "A_log": (
        lambda program: with_gates(program, 3), [STATE], [random(2, 3, QKV), GATES], ValueError,
        r"A_log must have shape \[4\], got \[3\]",
    ),
    "a mask of an input": (
        lambda program: program.mask_rows(INPUT, Program.input(1)), [], [GATES, GATES], ValueError,
        "x of step 0 of program must be a result",
    ),
    "factors of an input": (
        lambda program: program.scale_columns(INPUT, program.constant(random(16))), [], [random(2, 3, 16)], ValueError,
        "x of step 0 of program must be a result",
    ),
    "factors that are no constant": (
        lambda program: program.scale_columns(program.scaled_add(INPUT), Program.input(1)), [],
        [random(2, 3, 16), random(16)], ValueError, "factors of step 1 of program must be a constant",
    ),
    "too few factors": (
        lambda program: program.scale_columns(program.scaled_add(INPUT), program.constant(random(15))), [],
        [random(2, 3, 16)], ValueError,
        r"step 1: scale_columns: factors must have a number for each of the columns of x, .*, got \[15\] for \[2, 3, 16\]",
    ),
    "factors of another dtype": (
        lambda program: program.scale_columns(program.scaled_add(INPUT), program.constant(random(16).bfloat16())), [],
        [random(2, 3, 16)], TypeError, "scale_columns: factors must be float32",
    ),
    "a gate": (
        lambda program: program.gated_heads(INPUT, Program.input(1), 3, 0, 6), [], [random(2, 3, 16), GATES], ValueError,
        r"x must have heads of 3 columns, got \[2, 3, 16\]",
    ),
    "a step of gates": (
        lambda program: program.gated_heads(INPUT, Program.input(1), 4, 0, 3), [], [random(2, 3, 16), GATES], ValueError,
        "gate_step of step 0 of program must be at least gate_size, and a gate given, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("write, states, inputs, error, match", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_changes_no_state(
    write: Callable[[Program], None], states: list[Tensor], inputs: list[Tensor], error: type[Exception], match: str
) -> None:
    program, before = Program(), [state.clone() for state in states]
    write(program)
    with pytest.raises(error, match=match):
        ran(program, states, *inputs)
    assert all(map(torch.equal, states, before))
