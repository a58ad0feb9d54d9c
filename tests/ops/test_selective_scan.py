# SPDX-License-Identifier: Apache-2.0
"""selective_scan: every row against float64, beside transformers' own functions; states that go on and are changed in
place, padding, packed sequences, extreme numbers; what it refuses with data and without."""

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
from lowbit.reference import selective_scan as reference

op = torch.ops.lowbit.selective_scan
scan_row = fixture_of(testing.rows("selective_scan"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
SHAPES = [
    (1, 1, 1, 1, 1), (2, 1, 34, 2, 16), (1, 1, 160, 1, 40), (3, 2, 6, 2, 5), (1, 17, 48, 3, 17), (2, 16, 16, 1, 16),
    (1, 33, 300, 1, 16), (2, 50, 20, 1, 8), (1, 80, 64, 2, 33), (1, 40, 130, 1, 1), (5, 0, 8, 1, 8), (0, 3, 8, 1, 8),
]  # fmt: skip
"""B, T, D, G, S"""
OF_TOKENS = ("x", "dt", "B", "C", "z")


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, bare: bool = False) -> dict[str, Any]:
    """A call as a layer makes it; or a bare one, without softplus, bias, D, gate and a first state."""
    batch, tokens, channels, groups, s = shape
    call = {
        "x": torch.randn(batch, tokens, channels).to(dtype),
        "dt": torch.randn(batch, tokens, channels).to(dtype),
        "A": -torch.rand(channels, s) * 4,
        "B": torch.randn(batch, tokens, groups, s).to(dtype),
        "C": torch.randn(batch, tokens, groups, s).to(dtype),
    }
    if bare:
        return call
    return call | {
        "D": torch.randn(channels),
        "z": torch.randn(batch, tokens, channels).to(dtype),
        "dt_bias": torch.randn(channels) - 2,
        "softplus": True,
        "dt_limit": (1e-3, 2.0),
        "state": torch.randn(batch, channels, s),
    }


def part_of(call: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return call | {name: call[name][:, begin:end] for name in OF_TOKENS if name in call}


def assert_computed(results: tuple[Tensor, Tensor], call: dict[str, Any], what: str = "") -> None:
    """Within the roundings of the sums, and of y to its dtype."""
    y, state = results
    wanted, wanted_state = reference.selective_scan(**call)
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
def test_every_row_is_within_the_roundings_of_its_sums(scan_row: str, bare: bool, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    for number, shape in enumerate(SHAPES):
        call = made(shape, DTYPES[number % 3], bare=bare)
        with subtests.test(shape=shape):
            with forced(scan_row):
                results = lowbit.selective_scan(**call)
            assert_computed(results, call, scan_row)


def test_one_group_needs_no_dimension() -> None:
    call = made((2, 5, 20, 1, 6))
    narrow = call | {name: call[name][:, :, 0] for name in ("B", "C")}
    for one, other in zip(lowbit.selective_scan(**call), lowbit.selective_scan(**narrow), strict=True):
        assert one.equal(other)
    assert_computed(lowbit.selective_scan(**narrow), narrow)


def test_packed_sequences_are_those_sequences(scan_row: str) -> None:
    """To the bit, with the states of each; a sequence without tokens keeps its state."""
    call = made((1, 65, 36, 2, 20))
    ends = [0, 1, 26, 26, 32, 65]
    state = torch.randn(5, 36, 20)
    for dtype in (torch.int32, torch.int64):
        packed = call | {"state": state, "cu_seqlens": torch.tensor(ends, dtype=dtype)}
        with forced(scan_row):
            y, last = lowbit.selective_scan(**packed)
        for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            with forced(scan_row):
                one, one_state = lowbit.selective_scan(**part_of(call, begin, end) | {"state": state[n : n + 1]})
            assert y[:, begin:end].equal(one) and last[n].equal(one_state[0])
        assert last[2].equal(state[2])
    assert_computed((y, last), packed, scan_row)


@pytest.mark.parametrize("lengths", [(30, 20), (1,) * 9, (25, 1, 2, 1)], ids=str)
def test_a_state_goes_on(scan_row: str, lengths: tuple[int, ...]) -> None:
    """A prompt in parts, and token by token, is within the budget of the whole. In place it has the same bits; without
    that the given state is not changed."""
    call = made((2, sum(lengths), 40, 2, 24))
    before, outs, at = call["state"].clone(), [], 0
    state, kept = call["state"], call["state"].clone()
    for length in lengths:
        part = part_of(call, at, at + length)
        with forced(scan_row):
            y, state = lowbit.selective_scan(**part | {"state": state})
            again, same = lowbit.selective_scan(**part | {"state": kept, "in_place": True})
        assert same is kept and kept.equal(state) and again.equal(y)
        outs.append(y)
        at += length
    assert_computed((torch.cat(outs, 1), state), call, scan_row)
    assert call["state"].equal(before)


def test_padding_on_the_left_leaves_the_state_to_the_bit(scan_row: str) -> None:
    call = made((2, 49, 24, 2, 16)) | {"softplus": False, "dt_bias": None, "dt_limit": (0.0, 1.0)}
    call["dt"][:], call["A"][0] = -1, -3e38
    for tokens in (49, 16, 1):
        with forced(scan_row):
            y, state = lowbit.selective_scan(**part_of(call, 0, tokens))
            assert state.equal(call["state"])
            assert not lowbit.selective_scan(**part_of(call, 0, tokens) | {"state": None})[1].any()
        assert y.isfinite().all()
    masked = made((1, 20, 24, 1, 16)) | {"state": None}
    masked["x"][:] = 0
    with forced(scan_row):
        assert not lowbit.selective_scan(**masked)[1].any()


def test_the_bits_do_not_depend_on_threads(subtests: pytest.Subtests) -> None:
    for shape in ((1, 300, 512, 1, 16), (3, 40, 16, 1, 128), (2, 1, 2048, 2, 16), (1, 1, 64, 1, 256)):
        call = made(shape)
        with subtests.test(shape=shape):
            same_for_any_threads(lambda: lowbit.selective_scan(**call), counts=(1, 2, 3, 7))  # noqa: B023


def test_any_strides() -> None:
    """As a layer has them: parts of one projection, tokens behind channels, states that are transposed."""
    x, z = torch.randn(2, 9, 80).split([40, 40], -1)
    b, c = torch.randn(2, 9, 16).split([8, 8], -1)
    call = made((2, 9, 40, 1, 8)) | {"x": x, "z": z, "B": b, "C": c}
    call["dt"] = call["dt"].mT.contiguous().mT
    call["A"] = call["A"].mT.contiguous().mT
    call["state"] = call["state"].mT.contiguous().mT
    dense = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in call.items()}
    for ours, theirs in zip(lowbit.selective_scan(**call), lowbit.selective_scan(**dense), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(ValueError, match="selective_scan: state must be contiguous"):
        lowbit.selective_scan(**call, in_place=True)


def test_a_strong_decay_forgets_and_does_not_overflow(scan_row: str) -> None:
    call = made((1, 60, 20, 1, 16)) | {"dt_limit": (0.0, math.inf)}
    call["dt"][:, 7::19] = 1e30
    call["x"][:, 7::19] *= 1e-30
    call["state"] *= 1e10
    with forced(scan_row):
        results = lowbit.selective_scan(**call)
    assert_computed(results, call, scan_row)
    assert results[1].abs().max() < 1e3


def test_decays_have_their_relative_accuracy_everywhere(scan_row: str) -> None:
    """The state is ones, which one token with x = 0 lets decay; delta is A, A -1."""
    delta = torch.cat([torch.linspace(0, 80, 999), torch.tensor([1e-30, 1e-3, math.log(2) / 2, 1.0])])
    for tokens in (1, 2):  # the second one has no effect
        dt, none = torch.zeros(1, tokens, len(delta)), torch.zeros(1, tokens, len(delta))
        dt[:, 0] = delta
        one = torch.ones(1, tokens, 1)
        with forced(scan_row):
            _, state = lowbit.selective_scan(
                none, dt, -torch.ones(len(delta), 1), one, one, state=torch.ones(1, len(delta), 1)
            )
        wanted = delta.double().neg().exp()
        testing.assert_within(state.flatten(), wanted, U * (6 + 2 * delta.double()) * wanted, what=scan_row)


def test_nan_stays_in_its_channel_or_its_group(scan_row: str) -> None:
    call = made((1, 60, 40, 2, 16))
    call["B"][0, 40, 1, 3], call["x"][0, 50, 7] = torch.nan, torch.inf
    with forced(scan_row):
        clean = lowbit.selective_scan(**call | {"B": call["B"].nan_to_num(), "x": call["x"].nan_to_num(posinf=1)})
        y, state = lowbit.selective_scan(**call)
    assert y[0, 59, 20:].isnan().all() and state[0, 20:, 3].isnan().all() and not y[0, 59, 7].isfinite()
    rest = [i for i in range(20) if i != 7]
    assert y[0, :, rest].equal(clean[0][0, :, rest]) and state[0, rest].equal(clean[1][0, rest])
    assert y[:, :40].equal(clean[0][:, :40])


def test_the_functions_of_transformers_agree() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mamba import modeling_mamba as theirs

    if not hasattr(theirs, "mamba_selective_scan"):
        pytest.skip("this version of transformers has no function of the scan")
    call = made((2, 70, 32, 1, 16)) | {"dt_limit": (0.0, math.inf), "state": None}
    x, dt, z, b, c = (
        call[name] if call[name].dim() == 3 else call[name][:, :, 0] for name in ("x", "dt", "z", "B", "C")
    )
    wanted = theirs.mamba_selective_scan(
        x.mT, dt.mT, call["A"], b.mT, c.mT, call["D"], z.mT, call["dt_bias"], True, return_last_state=True
    )
    for our, their in zip(lowbit.selective_scan(**call), (wanted[0].mT, wanted[1]), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)
    state = torch.randn(2, 32, 16)
    ours = lowbit.selective_scan(**part_of(call, 0, 1) | {"state": state})
    y = theirs.mamba_selective_state_update(
        state, x[:, 0], dt[:, 0], call["A"], b[:, 0], c[:, 0], call["D"], call["dt_bias"], True, z[:, 0]
    )
    for our, their in zip(ours, (y[:, None], state), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


GOOD = {
    name: value for name, value in made((2, 3, 8, 2, 6)).items() if name not in ("softplus", "dt_limit")
} | {"dt_min": 0.0, "dt_max": 1.0}  # fmt: skip
PACKED = made((1, 6, 8, 2, 8)) | {"state": None}


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 3, 8).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 3, 2, 4)}, ValueError, r"x must have shape \[B, T, D\], D at least 1, got \[2, 3, 2, 4\]"),
    ({"x": torch.randn(2, 3, 0)}, ValueError, r"x must have shape \[B, T, D\], D at least 1, got \[2, 3, 0\]"),
    ({"dt": torch.randn(2, 3, 4)}, ValueError, r"dt must have shape \[2, 3, 8\], got \[2, 3, 4\]"),
    ({"dt": torch.zeros(2, 3, 8, dtype=torch.int32)}, TypeError, "dt must be float32, bfloat16 or float16, got int32"),
    ({"A": torch.zeros(8)}, ValueError, r"A must have shape \[8, 6\], got \[8\]"),
    ({"A": torch.zeros(8, 6).double()}, TypeError, "A must be float32, bfloat16 or float16, got float64"),
    ({"B": torch.randn(2, 3, 6)}, ValueError, r"B must have shape \[B, T, G, S\], G and S at least 1, got \[2, 3, 6\]"),
    ({"B": torch.randn(2, 2, 2, 6)}, ValueError, r"B must have shape \[2, 3, 2, 6\], got \[2, 2, 2, 6\]"),
    ({"B": torch.randn(2, 3, 2, 6).half()}, TypeError, "B must be float32, got float16"),
    ({"B": torch.randn(2, 3, 3, 6), "C": torch.randn(2, 3, 3, 6)}, ValueError, "the channels of x must be a multiple of the 3 groups of B and C, got 8"),
    ({"C": torch.randn(2, 3, 2, 7)}, ValueError, r"C must have shape \[2, 3, 2, 6\], got \[2, 3, 2, 7\]"),
    ({"D": torch.zeros(8, 1)}, ValueError, r"D must have shape \[8\], got \[8, 1\]"),
    ({"z": torch.zeros(2, 3, 4)}, ValueError, r"z must have shape \[2, 3, 8\], got \[2, 3, 4\]"),
    ({"z": torch.zeros(2, 3, 8).half()}, TypeError, "z must be float32, got float16"),
    ({"dt_bias": torch.zeros(3)}, ValueError, r"dt_bias must have shape \[8\], got \[3\]"),
    ({"state": torch.zeros(2, 6, 8)}, ValueError, r"state must have shape \[2, 8, 6\], got \[2, 6, 8\]"),
    ({"state": torch.zeros(2, 8, 6).half()}, TypeError, "state must be float32 or bfloat16, got float16"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"x must have shape \[1, T, D\] with cu_seqlens, got \[2, 3, 8\]"),
    ({"dt_min": -0.5}, ValueError, "dt_min must be finite and at least 0, got -0.5"),
    ({"dt_max": float("nan")}, ValueError, "dt_max must be at least dt_min = 0, got nan"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"selective_scan: {text}")


@pytest.mark.parametrize("name, value, text", [
    ("dt", torch.nan, r"dt must be finite, got nan at \[1, 40, 2\]"),
    ("dt", -torch.inf, r"dt must be finite, got -inf at \[1, 40, 2\]"),
    ("A", 0.5, r"A must be finite and at most 0, got 0.5 at \[2, 4\]"),
    ("A", -torch.inf, r"A must be finite and at most 0, got -inf at \[2, 4\]"),
    ("dt_bias", torch.inf, r"dt_bias must be finite, got inf at \[2\]"),
])  # fmt: skip
def test_a_bad_value_is_named_with_its_place(scan_row: str, name: str, value: float, text: str) -> None:
    for dtype in DTYPES:
        call = made((2, 90, 6, 1, 6))
        call[name] = call[name].to(dtype)
        call[name][{"dt": (1, 40, 2), "A": (2, 4), "dt_bias": 2}[name]] = value
        state = call["state"].clone()
        with pytest.raises(ValueError, match=f"selective_scan: {text}"), forced(scan_row):
            lowbit.selective_scan(**call, in_place=True)
        assert call["state"].equal(state)


def test_lengths_that_do_not_add_up_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"selective_scan: cu_seqlens must rise from 0 to the 6 tokens of x, got cu_seqlens\[1\] = 4"
    ):
        lowbit.selective_scan(**PACKED | {"cu_seqlens": torch.tensor([0, 4])})
    with pytest.raises(ValueError, match="selective_scan: in_place=True wants a state to change, got None"):
        lowbit.selective_scan(**PACKED, in_place=True)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, number: int) -> None:
    x, dt, a, b, c, d, z, bias, _, _, state = made((1, 5, 8, 2, 6), dtype).values()
    ends, first = (torch.tensor([0, 2, 5]), torch.randn(2, 8, 6)) if number == 2 else (None, state)
    optional = (None, None, None) if number == 1 else (d, z, bias)
    torch.library.opcheck(op.default, (x, dt, a, b, c, 0.0, 1.0, *optional, first, True, ends))
    in_place = torch.ops.lowbit.selective_scan_.default
    torch.library.opcheck(in_place, (x, dt, a, b, c, first, 0.0, 1.0, *optional, True, ends))


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda call: lowbit.selective_scan(**call), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for tokens in (3, 5, 17):
        call = made((2, tokens, 8, 2, 6))
        for ours, theirs in zip(compiled(call), lowbit.selective_scan(**call), strict=True):
            assert ours.equal(theirs)
    assert len(graphs) == 1
