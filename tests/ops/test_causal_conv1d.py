# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d: every row against float64, beside transformers' own functions; states that go on, packed sequences,
extreme numbers; what it refuses with data and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor, nn

import lowbit
from lowbit import testing
from lowbit.reference import causal_conv1d as reference

op = torch.ops.lowbit.causal_conv1d
conv_row = fixture_of(testing.rows("causal_conv1d"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
SHAPES = [
    (1, 1, 1, 2), (2, 1, 16, 4), (3, 2, 15, 4), (1, 3, 17, 5), (2, 16, 33, 3), (1, 17, 127, 8), (2, 70, 128, 4),
    (1, 5, 129, 6), (3, 33, 300, 7), (4, 0, 8, 4), (0, 3, 8, 4),
]  # fmt: skip
"""B, T, D, K"""


def made(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, kept: int | None = 0, with_bias: bool = True,
    weight_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:  # fmt: skip
    """A call; `kept` is the number of columns of its state: 0 for K - 1, None for no state."""
    batch, tokens, channels, taps = shape
    return {
        "x": torch.randn(batch, tokens, channels).to(dtype),
        "weight": torch.randn(channels, taps).to(weight_dtype),
        "bias": torch.randn(channels).to(weight_dtype) if with_bias else None,
        "state": None if kept is None else torch.randn(batch, channels, kept or taps - 1).to(dtype),
    }


def assert_computed(results: tuple[Tensor, Tensor], call: dict[str, Any], what: str = "") -> None:
    """Within the roundings of the sum, of silu, and of y to its dtype; the state is inputs to the bit."""
    y, state = results
    wanted, wanted_state = reference.causal_conv1d(**call)
    error, dtype = U * reference.roundings(**call), call["x"].dtype
    roundoff = testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
    assert y.dtype == state.dtype == dtype and y.is_contiguous() and state.is_contiguous()
    rounding = roundoff * (wanted.abs() + error + torch.finfo(dtype).smallest_normal)
    testing.assert_within(y, wanted, error + rounding + 1e-30, what=f"y of {what}")
    assert state.double().equal(wanted_state)


def calls(activation: str | None) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Yield each shape three times: without a state, with one of K - 1 columns, and with one of K or more."""
    for number, shape in enumerate(SHAPES):
        for turn in range(3):
            yield shape, turn, made(
                shape, DTYPES[number % 3], kept=(None, 0, min(shape[3] + number % 2, 8))[turn],
                with_bias=turn != 1, weight_dtype=DTYPES[(number + turn) % 3],
            ) | {"activation": activation}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_row_is_within_the_roundings_of_its_sums(
    conv_row: str, activation: str | None, subtests: pytest.Subtests
) -> None:
    torch.manual_seed(0)
    for shape, turn, call in calls(activation):
        with subtests.test(shape=shape, turn=turn):
            with forced(conv_row):
                results = lowbit.causal_conv1d(**call)
            assert_computed(results, call, conv_row)


def test_packed_sequences_are_those_sequences(conv_row: str) -> None:
    """To the bit, with the states of each; a sequence without tokens keeps its state."""
    call = made((1, 145, 40, 4)) | {"activation": "silu"}
    ends = [0, 1, 14, 14, 16, 145]
    for kept in (3, 4):
        state = torch.randn(5, 40, kept)
        for dtype in (torch.int32, torch.int64):
            packed = call | {"state": state, "cu_seqlens": torch.tensor(ends, dtype=dtype)}
            with forced(conv_row):
                y, last = lowbit.causal_conv1d(**packed)
        for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            with forced(conv_row):
                one, one_state = lowbit.causal_conv1d(
                    **call | {"x": call["x"][:, begin:end], "state": state[n : n + 1]}
                )
            assert y[:, begin:end].equal(one) and last[n].equal(one_state[0])
        assert last[2].equal(state[2])
        assert_computed((y, last), packed, conv_row)


@pytest.mark.parametrize("lengths", [(30, 20), (1,) * 9, (13, 1, 2, 0, 1)], ids=str)
def test_a_prompt_in_parts_has_the_bits_of_the_whole(conv_row: str, lengths: tuple[int, ...]) -> None:
    """The given state is not changed."""
    call = made((2, sum(lengths), 50, 4), torch.bfloat16, kept=4) | {"activation": "silu"}
    state, before, outs, at = call["state"], call["state"].clone(), [], 0
    with forced(conv_row):
        whole, end = lowbit.causal_conv1d(**call)
    for length in lengths:
        with forced(conv_row):
            y, state = lowbit.causal_conv1d(**call | {"x": call["x"][:, at : at + length], "state": state})
        outs.append(y)
        at += length
    assert torch.cat(outs, 1).equal(whole) and state.equal(end) and call["state"].equal(before)


def test_the_bits_do_not_depend_on_threads(subtests: pytest.Subtests) -> None:
    for shape in ((1, 300, 100, 4), (3, 700, 48, 3), (2, 1, 9000, 4), (1, 1000, 16, 8)):
        call = made(shape) | {"activation": "silu"}
        with subtests.test(shape=shape):
            same_for_any_threads(lambda call=call: lowbit.causal_conv1d(**call), counts=(1, 2, 3, 7))


def test_any_strides() -> None:
    """As layers have them: a part of a projection, its transposed view, taps and states with dense channels."""
    call = made((2, 9, 32, 4)) | {"activation": "silu"}
    projected = torch.randn(2, 9, 96)
    part = projected[..., 32:64]
    views = {
        "a part": {"x": part},
        "dense over time": {"x": part.mT.contiguous().mT},
        "an expanded token": {"x": part[:, :1].expand(-1, 9, -1)},
        "dense channels": {name: call[name].mT.contiguous().mT for name in ("weight", "state")},
        "every second channel": {
            "weight": torch.randn(64, 8)[::2, ::2], "bias": torch.randn(64)[::2], "state": torch.randn(2, 64, 7)[:, ::2, ::2],
        },
    }  # fmt: skip
    for given in views.values():
        dense = {name: tensor.contiguous() for name, tensor in given.items()}
        for ours, theirs in zip(
            lowbit.causal_conv1d(**call | given), lowbit.causal_conv1d(**call | dense), strict=True
        ):
            assert ours.equal(theirs)


def test_large_and_tiny_numbers(conv_row: str) -> None:
    for scale in (1e-40, 1e-20, 1e15, 1e30):
        call = made((1, 20, 20, 4)) | {"activation": "silu"}
        call["x"] *= scale
        with forced(conv_row):
            results = lowbit.causal_conv1d(**call)
        assert_computed(results, call, conv_row)
        call["x"][:] = -90 - 10 * torch.rand(1, 20, 20)
        call["weight"], call["bias"], call["state"] = torch.ones(20, 4), None, None
        with forced(conv_row):
            results = lowbit.causal_conv1d(**call)
        assert_computed(results, call, conv_row)


def test_nan_stays_in_its_channel_and_its_window(conv_row: str) -> None:
    call = made((1, 30, 40, 4)) | {"activation": "silu"}
    clean = lowbit.causal_conv1d(**call)[0]
    call["x"][0, 20, 7] = torch.nan
    with forced(conv_row):
        y, state = lowbit.causal_conv1d(**call)
    assert y[0, 20:24, 7].isnan().all() and state.isfinite().all()
    y[0, 20:24, 7] = clean[0, 20:24, 7] = 0
    assert y.isfinite().all()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_a_depthwise_conv1d(activation: str | None, with_bias: bool) -> None:
    conv = nn.Conv1d(24, 24, 4, groups=24, padding=3, bias=with_bias)
    x = torch.randn(2, 11, 24)
    with torch.no_grad():
        y, state = lowbit.causal_conv1d(x, conv.weight.squeeze(1), conv.bias, activation=activation)
        theirs = conv(x.mT)[..., :11].mT
    torch.testing.assert_close(y, nn.functional.silu(theirs) if activation else theirs, rtol=1e-5, atol=1e-6)
    assert state.equal(x[:, -3:].mT)


@pytest.mark.parametrize("model", ["qwen3_next", "mamba2", "lfm2"])
def test_the_functions_and_caches_of_transformers_agree(model: str) -> None:
    """Their [B, D, T] views go in without a copy, their conv_states as they are."""
    pytest.importorskip("transformers")
    theirs = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=["causal_conv1d_fn"])
    weight, bias, activation = torch.randn(24, 4), torch.randn(24), "silu" if model != "lfm2" else None
    x = torch.randn(2, 11, 24).mT  # of a projection
    y, _ = lowbit.causal_conv1d(x.mT, weight, bias, activation=activation)
    torch.testing.assert_close(y.mT, theirs.causal_conv1d_fn(x, weight, bias, activation), rtol=1e-5, atol=1e-6)
    conv_states = x[..., -4:].clone()
    for _ in range(3):
        token = torch.randn(2, 1, 24).mT
        y, state = lowbit.causal_conv1d(token.mT, weight, bias, conv_states, activation=activation)
        out = theirs.causal_conv1d_update(token, conv_states, weight, bias, activation)
        torch.testing.assert_close(y.mT, out, rtol=1e-5, atol=1e-6)
        assert state.equal(conv_states)  # which the update has written


GOOD = made((2, 3, 8, 4))


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 3, 8).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 8)}, ValueError, r"x must have shape \[B, T, D\], D at least 1, got \[2, 8\]"),
    ({"x": torch.randn(2, 3, 0)}, ValueError, r"x must have shape \[B, T, D\], D at least 1, got \[2, 3, 0\]"),
    ({"weight": torch.randn(8, 1, 4)}, ValueError, r"weight must have shape \[8, K\] with K from 2 to 8, got \[8, 1, 4\]"),
    ({"weight": torch.randn(7, 4)}, ValueError, r"weight must have shape \[8, K\] with K from 2 to 8, got \[7, 4\]"),
    ({"weight": torch.randn(8, 9)}, ValueError, r"weight must have shape \[8, K\] with K from 2 to 8, got \[8, 9\]"),
    ({"weight": torch.randn(8, 1)}, ValueError, r"weight must have shape \[8, K\] with K from 2 to 8, got \[8, 1\]"),
    ({"weight": torch.ones(8, 4).int()}, TypeError, "weight must be float32, bfloat16 or float16, got int32"),
    ({"bias": torch.randn(8, 1)}, ValueError, r"bias must have shape \[8\], got \[8, 1\]"),
    ({"bias": torch.randn(8).double()}, TypeError, "bias must be float32, bfloat16 or float16, got float64"),
    ({"state": torch.randn(2, 8, 2)}, ValueError, r"state must have shape \[2, 8, S\] with S from 3 to 8, got \[2, 8, 2\]"),
    ({"state": torch.randn(2, 8, 9)}, ValueError, r"state must have shape \[2, 8, S\] with S from 3 to 8, got \[2, 8, 9\]"),
    ({"state": torch.randn(2, 3, 8)}, ValueError, r"state must have shape \[2, 8, S\] with S from 3 to 8, got \[2, 3, 8\]"),
    ({"state": torch.randn(2, 8, 3).bfloat16()}, TypeError, "state must be float32, got bfloat16"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"x must have shape \[1, T, D\] with cu_seqlens, got \[2, 3, 8\]"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens must have shape \[N \+ 1\], got \[0\]"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"causal_conv1d: {text}")


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="causal_conv1d: activation must be None or 'silu', got 'relu'"):
        lowbit.causal_conv1d(**GOOD, activation="relu")


@pytest.mark.parametrize("ends, text", [
    ([1, 6], r"cu_seqlens\[0\] = 1"),
    ([0, 4, 3, 6], r"cu_seqlens\[2\] = 3 after 4"),
    ([0, 4], r"cu_seqlens\[1\] = 4 after 0"),
    ([0, 8, 6], r"cu_seqlens\[2\] = 6 after 8"),
    ([0], r"cu_seqlens\[0\] = 0"),
    ([0, -1, 6], r"cu_seqlens\[1\] = -1 after 0"),
])  # fmt: skip
def test_lengths_that_do_not_add_up_are_named(ends: list[int], text: str) -> None:
    call = made((1, 6, 8, 4), kept=None) | {"cu_seqlens": torch.tensor(ends)}
    with pytest.raises(
        ValueError, match=f"causal_conv1d: cu_seqlens must rise from 0 to the 6 tokens of x, got {text}"
    ):
        lowbit.causal_conv1d(**call)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, number: int) -> None:
    call = made((1, 5, 20, 4), dtype, kept=(None, 0, 5)[number], with_bias=number > 0)
    ends = torch.tensor([0, 5]) if number == 2 else None
    torch.library.opcheck(op.default, (*call.values(), True, ends))


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda call: lowbit.causal_conv1d(**call, activation="silu"), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for tokens in (5, 9, 17):  # torch takes sizes that are equal at first for one
        call = made((2, tokens, 20, 4))
        for ours, theirs in zip(compiled(call), lowbit.causal_conv1d(**call, activation="silu"), strict=True):
            assert ours.equal(theirs)
    assert len(graphs) == 1
