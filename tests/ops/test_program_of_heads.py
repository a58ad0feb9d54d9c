# SPDX-License-Identifier: Apache-2.0
"""Steps of single heads in programs, of which latent attention is made: bit for bit what the separate calls give;
latent attention beside float64; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.ops.gather_linear import gather_linear
from lowbit.ops.program import NONE, Program
from lowbit.ops.rope_append import HALVES, NEIGHBOURS_TO_HALVES, rope_append
from lowbit.ops.run_program import run_program
from lowbit.quant.packing import pack_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KEPT, TURNED, VALUES, RANK = 3, 24, 16, 20, 40
INPUT, COS, SIN = map(Program.input, range(3))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ran(program: Program, states: list[Tensor], *inputs: Tensor, starts: tuple[int, ...] = ()) -> Tensor:
    return run_program(program.code, program.constants, states, list(inputs), list(starts))


def by_rope_append(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    """``x [B, L, H, E]`` as ``[B, L, H, E]``."""
    none = x.new_empty(len(x), 0, x.shape[1], x.shape[-1])
    return rope_append(x, cos, sin, none, none, 0, weight, **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("how", ["copied", "rotated", "normalized and rotated"])
def test_heads(how: str, length: int, dtype: torch.dtype) -> None:
    """As a result, in columns of another result, and in columns of a state behind its tokens."""
    x, (cos, sin) = random(2, length, 7 + 3 * 30, dtype=dtype), random(2, 2, length, 12, seed=2)
    weight = random(20, seed=3) if "normalized" in how else None
    options: dict[str, Any] = {"rotation": NEIGHBOURS_TO_HALVES} if "rotated" in how else {}
    options |= {} if weight is None else {"eps": 1e-5, "offset": 1.0}
    angles = (cos, sin) if "rotated" in how else (x.new_empty(1, length, 0),) * 2
    wanted = by_rope_append(x[..., 7:].unflatten(-1, (3, 30))[..., :20], *angles, weight, **options)
    named = options | ({"cos": COS, "sin": SIN} if "rotated" in how else {})

    def program_of(into: Callable[[Program], int], *where: int) -> Program:
        program = Program()
        norm = {} if weight is None else {"weight": program.constant(weight)}
        program.heads(INPUT, 3, 20, 7, 30, into(program), *where, **named, **norm)
        return program

    inputs = (x, cos, sin) if "rotated" in how else (x,)
    program = program_of(lambda _: NONE)
    assert torch.equal(ran(program, [], *inputs), wanted.flatten(2))
    whole: list[int] = []
    program = program_of(lambda program: whole.append(program.columns(INPUT, 3 * 25)) or whole[0], 5)
    program.heads(INPUT, 3, 5, 0, 30, whole[0])
    program.scaled_add(whole[0])
    both = torch.cat([x.unfold(-1, 5, 30)[:, :, :3], wanted], dim=-1)
    assert torch.equal(ran(program, [], *inputs), both.flatten(2))
    program = program_of(lambda _: Program.state(0), 4, 0)
    program.scaled_add(INPUT)
    state = torch.full((2, 3, length + 6, 30), 7.0, dtype=dtype)
    ran(program, [state], *inputs, starts=(2,))
    assert torch.equal(state[:, :, 2 : 2 + length, 4:24], wanted.transpose(1, 2))
    state[:, :, 2 : 2 + length, 4:24] = 7
    assert (state == 7).all()


def matrices(n: int, k: int, format: str, seed: int = 1) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """The packed matrices of each head, the numbers that describe one, and their values if they are floats."""
    spec, values = LinearSpec(format), random(HEADS, n, k, seed=seed)
    return torch.stack([pack_weight(each, spec)[0].data for each in values]), spec.op_args(n, k), values.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["float32", "float16", "int8"])
@pytest.mark.parametrize("length", [1, 6])
def test_head_linear(length: int, format: str, dtype: torch.dtype) -> None:
    packed, op_args, _ = matrices(VALUES, RANK, format)
    x = random(2, length, HEADS * RANK, dtype=dtype)
    program = Program()
    program.head_linear(INPUT, program.constant(packed), op_args)
    index = torch.arange(HEADS, dtype=torch.int32).expand(2 * length, HEADS)
    wanted = gather_linear(x.view(-1, HEADS, RANK), packed, index, op_args)
    assert torch.equal(ran(program, [], x), wanted.view(2, length, -1))


def latent_program(to_queries: tuple[Any, ...], to_values: tuple[Any, ...], weight: Tensor, causal: bool) -> Program:
    """What models/latent_steps.py writes."""
    program, (keys, values) = Program(), map(Program.state, range(2))
    q, made, cos, sin, mask = map(Program.input, range(5))
    norm = {"weight": program.constant(weight), "eps": 1e-5}
    program.heads(made, 1, RANK, 0, RANK, keys, 0, 0, **norm)
    program.heads(made, 1, TURNED, RANK, TURNED, keys, RANK, 0, cos, sin, HALVES)
    queries = program.columns(q, HEADS * (RANK + TURNED))
    kept = program.heads(q, HEADS, KEPT, 0, KEPT + TURNED)
    projected = program.head_linear(kept, program.constant(to_queries[0]), to_queries[1])
    program.heads(projected, HEADS, RANK, 0, RANK, queries)
    program.heads(q, HEADS, TURNED, KEPT, KEPT + TURNED, queries, RANK, NONE, cos, sin, HALVES)
    attended = program.attention(queries, keys, values, 0, 0.2, mask, causal)
    program.head_linear(attended, program.constant(to_values[0]), to_values[1])
    return program


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.double().chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


@pytest.mark.parametrize("length", [1, 5])
def test_latent_attention(length: int) -> None:
    """Behind 6 tokens with a mask, and without one as the first tokens; beside keys and values of all heads in
    float64."""
    to_queries, to_values = matrices(RANK, KEPT, "float32"), matrices(VALUES, RANK, "float32", seed=2)
    weight = 1 + random(RANK, seed=3) / 4
    for before in (0, 6):
        q, made = random(2, length, HEADS * (KEPT + TURNED)), random(2, length, RANK + TURNED, seed=4)
        cos, sin = random(2, 1, length, TURNED, seed=5)
        room = random(2, 1, before + length + 3, RANK + TURNED, seed=6)
        held = room.clone().double()
        mask = torch.ones(1, 1, length, before + length, dtype=torch.bool).tril(before) if before else torch.empty(0)
        program = latent_program(to_queries, to_values, weight, causal=True)
        got = ran(program, [room, room[..., :RANK]], q, made, cos, sin, mask, starts=(before,))

        new = made.double()
        latents = new[..., :RANK] * (new[..., :RANK].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        held[:, 0, before : before + length] = torch.cat([latents, turned(new[..., RANK:], cos, sin)], dim=-1)
        assert (room - held).abs().max() <= 1e-5 * held.abs().max()
        seen = held[:, 0, : before + length]
        c, r = seen[..., :RANK], seen[..., RANK:]
        rotated = r[:, None].expand(-1, HEADS, -1, -1)
        keys = torch.cat([torch.einsum("bsr,hrk->bhsk", c, to_queries[2]), rotated], dim=-1)
        values = torch.einsum("bsr,hvr->bhsv", c, to_values[2])
        query = q.double().unflatten(-1, (HEADS, -1)).transpose(1, 2)
        query = torch.cat([query[..., :KEPT], turned(query[..., KEPT:], cos, sin)], dim=-1)
        visible = torch.ones(length, before + length, dtype=torch.bool).tril(before)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, visible, scale=0.2)
        assert (got - wanted.transpose(1, 2).flatten(2)).abs().max() <= 2e-5 * wanted.abs().max()


def one(fields: Callable[[Program], Any]) -> Program:
    program = Program()
    fields(program)
    program.scaled_add(INPUT)
    return program


X = random(2, 3, 96)
REFUSED: dict[str, tuple[Callable[[Program], Any], tuple[Tensor, ...], str]] = {
    "columns": (lambda p: p.heads(INPUT, 3, 20, 40, 30), (), r"heads: x must have shape \[B, T, n\] with 3 times 20 columns from 40 on"),
    "an input": (lambda p: p.heads(INPUT, 3, 20, 0, 30, into=INPUT), (), "into of step 0 of program must be a result or a state"),
    "no start": (lambda p: p.heads(INPUT, 3, 20, 0, 30, into=Program.state(0)), (torch.zeros(2, 3, 9, 20),), "start of step 0 of program must be at least 0"),
    "no state": (lambda p: p.heads(INPUT, 3, 20, 0, 30, start=0), (), "start of step 0 of program must come with a state"),
    "a small step": (lambda p: p.heads(INPUT, 3, 20, 0, 19), (), "step of step 0 of program must be at least 20, got 19"),
    "other heads": (lambda p: p.heads(INPUT, 3, 20, 0, 30, p.columns(INPUT, 61)), (), r"heads: into must have the rows of x and 3 heads, got \[2, 3, 61\]"),
    "few columns": (lambda p: p.heads(INPUT, 3, 20, 0, 30, p.columns(INPUT, 66), 3), (), "heads: into must have heads with room for 20 columns from 3 on, got 22"),
    "few columns of a state": (lambda p: p.heads(INPUT, 3, 20, 0, 30, Program.state(0), 1, 0), (torch.zeros(2, 3, 9, 20),), "into must have room for 20 columns from 1 on, got 20"),
    "few tokens": (lambda p: p.heads(INPUT, 3, 20, 0, 30, Program.state(0), 0, 0), (torch.zeros(2, 3, 4, 20),), "heads: into must have room for tokens 2 to 5, got 4"),
    "heads of a state": (lambda p: p.heads(INPUT, 3, 20, 0, 30, Program.state(0), 0, 0), (torch.zeros(2, 2, 9, 20),), r"into must have shape \[B, heads, S, m\], here 2 times 3, got \[2, 2, 9, 20\]"),
    "a dtype": (lambda p: p.heads(INPUT, 3, 20, 0, 30, Program.state(0), 0, 0), (torch.zeros(2, 3, 9, 20).half(),), "heads: into must be float32, got float16"),
    "cos alone": (lambda p: p.heads(INPUT, 3, 20, 0, 30, cos=COS), (), "cos and sin of step 0 of program must both be given, or none"),
    "a rotation": (lambda p: p.heads(INPUT, 3, 20, 0, 30, rotation=4), (), "rotation must be 0 to 3, got 4"),
    "a matrix": (lambda p: p.head_linear(INPUT, p.constant(matrices(16, 24, "float32")[0][0]), LinearSpec("float32").op_args(16, 24)), (), r"head_linear: weight must have shape \[heads, panels, panel_bytes\]"),
    "other columns": (lambda p: p.head_linear(INPUT, p.constant(matrices(16, 24, "float32")[0]), LinearSpec("float32").op_args(16, 24)), (), r"head_linear: x must have shape \[B, L, 3 \* 24\], got \[2, 3, 96\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    fields, states, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        program = one(fields)
        inputs = [X] * (2 if "cos" in case else 1)
        run_program(program.code, program.constants, list(states), inputs, [2] * ("start" in message or bool(states)))
    assert not any(state.any() for state in states)
