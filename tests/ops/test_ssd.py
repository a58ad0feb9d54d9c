# SPDX-License-Identifier: Apache-2.0
"""ssd: every row against float64, beside transformers' own functions; states that go on and are changed in place,
padding, packed sequences, extreme numbers; what it refuses with data and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.reference import ssd as reference

op = torch.ops.lowbit.ssd
ssd_row = fixture_of(testing.rows("ssd"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
SHAPES = [
    (1, 1, 1, 1, 1, 1), (2, 1, 4, 2, 17, 31), (1, 1, 3, 1, 64, 128), (3, 2, 2, 2, 3, 15), (1, 23, 4, 2, 33, 17),
    (2, 24, 1, 1, 32, 16), (1, 25, 3, 1, 15, 33), (2, 49, 2, 1, 48, 32), (1, 80, 8, 2, 64, 128), (1, 40, 2, 1, 1, 64),
    (5, 0, 2, 2, 8, 8), (0, 3, 1, 1, 8, 8),
]  # fmt: skip
"""B, T, H, G, P, S"""
OF_TOKENS = ("x", "dt", "B", "C")


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, bare: bool = False) -> dict[str, Any]:
    """A call as a layer makes it; or a bare one, without softplus, bias, D and a first state."""
    batch, tokens, heads, groups, p, s = shape
    call = {
        "x": torch.randn(batch, tokens, heads, p).to(dtype),
        "dt": torch.randn(batch, tokens, heads).to(dtype),
        "A": -torch.rand(heads) * 2,
        "B": torch.randn(batch, tokens, groups, s).to(dtype),
        "C": torch.randn(batch, tokens, groups, s).to(dtype),
    }
    if bare:
        return call
    return call | {
        "D": torch.randn(heads),
        "dt_bias": torch.randn(heads) - 2,
        "softplus": True,
        "dt_limit": (1e-3, 2.0),
        "state": torch.randn(batch, heads, p, s),
    }


def part_of(call: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return call | {name: call[name][:, begin:end] for name in OF_TOKENS}


def assert_computed(results: tuple[Tensor, Tensor], call: dict[str, Any], what: str = "") -> None:
    """Within the roundings of the sums, and of y to its dtype."""
    y, state = results
    wanted, wanted_state = reference.ssd(**call)
    error, error_state = reference.roundings(**call)
    roundoff = testing.ROUNDOFF[str(y.dtype).removeprefix("torch.")]
    assert y.dtype == call["x"].dtype and state.dtype == torch.float32
    assert y.is_contiguous() and state.is_contiguous() and state.shape == wanted_state.shape
    error = U * error
    testing.assert_within(
        y,
        wanted,
        error + roundoff * (wanted.abs() + error) + 1e-30 + roundoff * torch.finfo(y.dtype).smallest_normal,
        what=f"y of {what}",
    )
    testing.assert_within(state, wanted_state, U * error_state + 1e-30, what=f"state of {what}")


@pytest.mark.core
@pytest.mark.parametrize("bare", [False, True])
def test_every_row_is_within_the_roundings_of_its_sums(ssd_row: str, bare: bool, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    for number, shape in enumerate(SHAPES):
        call = made(shape, DTYPES[number % 3], bare=bare)
        with subtests.test(shape=shape):
            with forced(ssd_row):
                results = lowbit.ssd(**call)
            assert_computed(results, call, ssd_row)


def test_packed_sequences_are_those_sequences(ssd_row: str) -> None:
    """To the bit, with the states of each; a sequence without tokens keeps its state."""
    call = made((1, 65, 4, 2, 24, 20))
    ends = [0, 1, 26, 26, 32, 65]
    state = torch.randn(5, 4, 24, 20)
    for dtype in (torch.int32, torch.int64):
        packed = call | {"state": state, "cu_seqlens": torch.tensor(ends, dtype=dtype)}
        with forced(ssd_row):
            y, last = lowbit.ssd(**packed)
        for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            with forced(ssd_row):
                one, one_state = lowbit.ssd(**part_of(call, begin, end) | {"state": state[n : n + 1]})
            assert y[:, begin:end].equal(one) and last[n].equal(one_state[0])
        assert last[2].equal(state[2])
    assert_computed((y, last), packed, ssd_row)


@pytest.mark.parametrize("lengths", [(30, 20), (1,) * 9, (25, 1, 2, 1)], ids=str)
def test_a_state_goes_on(ssd_row: str, lengths: tuple[int, ...]) -> None:
    """A prompt in parts, and token by token, is within the budget of the whole. In place it has the same bits; without
    that the given state is not changed."""
    call = made((2, sum(lengths), 4, 2, 32, 40))
    before, outs, at = call["state"].clone(), [], 0
    state, kept = call["state"], call["state"].clone()
    for length in lengths:
        part = part_of(call, at, at + length)
        with forced(ssd_row):
            y, state = lowbit.ssd(**part | {"state": state})
            again, same = lowbit.ssd(**part | {"state": kept, "in_place": True})
        assert same is kept and kept.equal(state) and again.equal(y)
        outs.append(y)
        at += length
    assert_computed((torch.cat(outs, 1), state), call, ssd_row)
    assert call["state"].equal(before)


def test_padding_on_the_left_leaves_the_state_to_the_bit(ssd_row: str) -> None:
    call = made((2, 49, 4, 2, 16, 24)) | {"softplus": False, "dt_bias": None, "dt_limit": (0.0, 1.0)}
    call["dt"][:] = -1
    for tokens in (49, 24, 1):
        with forced(ssd_row):
            y, state = lowbit.ssd(**part_of(call, 0, tokens))
            assert state.equal(call["state"])
            assert not lowbit.ssd(**part_of(call, 0, tokens) | {"state": None})[1].any()
        assert y.isfinite().all()


def test_the_bits_do_not_depend_on_threads(subtests: pytest.Subtests) -> None:
    for shape in ((1, 300, 8, 1, 64, 64), (3, 40, 1, 1, 128, 128), (2, 1, 16, 2, 64, 128), (1, 1, 1, 1, 512, 128)):
        call = made(shape)
        with subtests.test(shape=shape):
            same_for_any_threads(lambda: lowbit.ssd(**call), counts=(1, 2, 3, 7))  # noqa: B023


def test_any_strides() -> None:
    """As a layer has them: parts of one projection, tokens behind heads, states that are transposed."""
    x, b, c = torch.randn(2, 9, 4 * 16 + 2 * 2 * 8).split([64, 16, 16], -1)
    call = made((2, 9, 4, 2, 16, 8)) | {
        "x": x.unflatten(-1, (4, 16)),
        "B": b.unflatten(-1, (2, 8)),
        "C": c.unflatten(-1, (2, 8)),
    }
    call["dt"] = call["dt"].mT.contiguous().mT
    call["A"] = torch.stack([call["A"], call["A"]], -1)[:, 0]
    call["state"] = call["state"].mT.contiguous().mT
    dense = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in call.items()}
    for ours, theirs in zip(lowbit.ssd(**call), lowbit.ssd(**dense), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(ValueError, match="ssd: state must be contiguous"):
        lowbit.ssd(**call, in_place=True)


def test_a_strong_decay_forgets_and_does_not_overflow(ssd_row: str) -> None:
    call = made((1, 60, 2, 1, 16, 16)) | {"dt_limit": (0.0, math.inf)}
    call["dt"][:, 7::19] = 1e30
    call["x"][:, 7::19] *= 1e-30
    call["state"] *= 1e10
    with forced(ssd_row):
        results = lowbit.ssd(**call)
    assert_computed(results, call, ssd_row)
    assert results[1].abs().max() < 1e3


def test_softplus_has_its_relative_accuracy_everywhere(ssd_row: str) -> None:
    """x and B of one token are ones, so that the state is delta."""
    speed = torch.cat([torch.linspace(-80, 80, 999), torch.tensor([0.0, -1e-3, 1e-3, 1e-30, 3e4])])
    one = torch.ones(1, 1, len(speed), 1)
    with forced(ssd_row):
        _, state = lowbit.ssd(
            one, speed[None, None], -torch.ones(len(speed)), one[:, :, :1], one[:, :, :1], softplus=True
        )
    wanted = speed.double().logaddexp(torch.zeros(1, dtype=torch.float64))
    testing.assert_within(state.flatten(), wanted, 6 * U * wanted, what=ssd_row)


def test_nan_stays_in_its_head_and_its_rows(ssd_row: str) -> None:
    call = made((1, 60, 4, 2, 40, 16))
    call["B"][0, 40, 1, 3], call["x"][0, 50, 0, 7] = torch.nan, torch.inf
    with forced(ssd_row):
        clean = lowbit.ssd(**call | {"B": call["B"].nan_to_num(), "x": call["x"].nan_to_num(posinf=1)})
        y, state = lowbit.ssd(**call)
    assert y[0, 59, 2:].isnan().all() and state[0, 2:, :, 3].isnan().all() and not y[0, 59, 0, 7].isfinite()
    rest = [i for i in range(40) if i != 7]
    assert y[:, :, 1].equal(clean[0][:, :, 1]) and y[0, :, 0, rest].equal(clean[0][0, :, 0, rest])
    assert y[:, :24].equal(clean[0][:, :24])


def test_the_functions_of_transformers_agree() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    if not hasattr(theirs, "mamba2_chunk_scan"):
        pytest.skip("this version of transformers has no function of the scan")
    call = made((2, 70, 4, 2, 32, 48))
    names = {"x": "hidden_states", "softplus": "dt_softplus", "state": "initial_states"}
    renamed = {names.get(name, name): value for name, value in call.items()}
    wanted = theirs.mamba2_chunk_scan(**renamed, chunk_size=16, return_final_states=True)
    for our, their in zip(lowbit.ssd(**call), wanted, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)
    one = part_of(call, 0, 1) | {"dt_limit": (0.0, math.inf)}
    state = call["state"].clone()
    y = theirs.mamba2_selective_state_update(
        state, one["x"][:, 0], one["dt"].mT.expand(-1, -1, 32), one["A"][:, None, None].expand(-1, 32, 48),
        one["B"][:, 0], one["C"][:, 0], one["D"][:, None].expand(-1, 32), one["dt_bias"][:, None].expand(-1, 32), True,
    )  # fmt: skip
    for our, their in zip(lowbit.ssd(**one), (y[:, None], state), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


GOOD = {
    name: value for name, value in made((2, 3, 4, 2, 8, 6)).items() if name not in ("softplus", "dt_limit")
} | {"dt_min": 0.0, "dt_max": 1.0}  # fmt: skip
PACKED = made((1, 6, 2, 2, 8, 8)) | {"state": None}


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 3, 4, 8).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 3, 32)}, ValueError, r"x must have shape \[B, T, H, P\], H and P at least 1, got \[2, 3, 32\]"),
    ({"x": torch.randn(2, 3, 4, 0)}, ValueError, r"x must have shape \[B, T, H, P\], H and P at least 1, got \[2, 3, 4, 0\]"),
    ({"dt": torch.randn(2, 3, 2)}, ValueError, r"dt must have shape \[2, 3, 4\], got \[2, 3, 2\]"),
    ({"dt": torch.zeros(2, 3, 4, dtype=torch.int32)}, TypeError, "dt must be float32, bfloat16 or float16, got int32"),
    ({"A": torch.zeros(2)}, ValueError, r"A must have shape \[4\], got \[2\]"),
    ({"A": torch.zeros(4).double()}, TypeError, "A must be float32, bfloat16 or float16, got float64"),
    ({"B": torch.randn(2, 3, 6)}, ValueError, r"B must have shape \[B, T, G, S\], G and S at least 1, got \[2, 3, 6\]"),
    ({"B": torch.randn(2, 2, 2, 6)}, ValueError, r"B must have shape \[2, 3, 2, 6\], got \[2, 2, 2, 6\]"),
    ({"B": torch.randn(2, 3, 2, 6).half()}, TypeError, "B must be float32, got float16"),
    ({"B": torch.randn(2, 3, 3, 6), "C": torch.randn(2, 3, 3, 6)}, ValueError, "the heads of x must be a multiple of the 3 groups of B and C, got 4"),
    ({"C": torch.randn(2, 3, 2, 7)}, ValueError, r"C must have shape \[2, 3, 2, 6\], got \[2, 3, 2, 7\]"),
    ({"D": torch.zeros(4, 8)}, ValueError, r"D must have shape \[4\], got \[4, 8\]"),
    ({"dt_bias": torch.zeros(3)}, ValueError, r"dt_bias must have shape \[4\], got \[3\]"),
    ({"state": torch.zeros(2, 4, 6, 8)}, ValueError, r"state must have shape \[2, 4, 8, 6\], got \[2, 4, 6, 8\]"),
    ({"state": torch.zeros(2, 4, 8, 6).half()}, TypeError, "state must be float32 or bfloat16, got float16"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"x must have shape \[1, T, H, P\] with cu_seqlens, got \[2, 3, 4, 8\]"),
    ({"dt_min": -0.5}, ValueError, "dt_min must be finite and at least 0, got -0.5"),
    ({"dt_min": 2.0}, ValueError, "dt_max must be at least dt_min = 2, got 1"),
    ({"dt_max": float("nan")}, ValueError, "dt_max must be at least dt_min = 0, got nan"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"ssd: {text}")


@pytest.mark.parametrize("name, value, text", [
    ("dt", torch.nan, r"dt must be finite, got nan at \[1, 40, 2\]"),
    ("dt", -torch.inf, r"dt must be finite, got -inf at \[1, 40, 2\]"),
    ("A", 0.5, r"A must be finite and at most 0, got 0.5 at \[2\]"),
    ("A", -torch.inf, r"A must be finite and at most 0, got -inf at \[2\]"),
    ("dt_bias", torch.inf, r"dt_bias must be finite, got inf at \[2\]"),
])  # fmt: skip
def test_a_bad_value_is_named_with_its_place(ssd_row: str, name: str, value: float, text: str) -> None:
    for dtype in DTYPES:
        call = made((2, 90, 3, 1, 8, 6))
        call[name] = call[name].to(dtype)
        call[name][(1, 40, 2) if name == "dt" else 2] = value
        with pytest.raises(ValueError, match=f"ssd: {text}"), forced(ssd_row):
            lowbit.ssd(**call)


def test_lengths_that_do_not_add_up_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"ssd: cu_seqlens must rise from 0 to the 6 tokens of x, got cu_seqlens\[1\] = 4"
    ):
        lowbit.ssd(**PACKED | {"cu_seqlens": torch.tensor([0, 4])})
    with pytest.raises(ValueError, match="ssd: in_place=True wants a state to change, got None"):
        lowbit.ssd(**PACKED, in_place=True)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, number: int) -> None:
    x, dt, a, b, c, d, bias, _, _, state = made((1, 5, 4, 2, 8, 6), dtype).values()
    ends, first = (torch.tensor([0, 2, 5]), torch.randn(2, 4, 8, 6)) if number == 2 else (None, state)
    optional = (None, None) if number == 1 else (d, bias)
    torch.library.opcheck(op.default, (x, dt, a, b, c, 0.0, 1.0, *optional, first, True, ends))
    torch.library.opcheck(torch.ops.lowbit.ssd_.default, (x, dt, a, b, c, first, 0.0, 1.0, *optional, True, ends))


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda call: lowbit.ssd(**call), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for tokens in (3, 5, 17):
        call = made((2, tokens, 4, 2, 8, 6))
        for ours, theirs in zip(compiled(call), lowbit.ssd(**call), strict=True):
            assert ours.equal(theirs)
    assert len(graphs) == 1
