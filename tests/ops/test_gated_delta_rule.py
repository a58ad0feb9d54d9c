# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule: every row against float64, beside transformers' own functions; states that go on, padding, packed
sequences, extreme numbers; what it refuses with data and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.reference import linear_attention as reference

op = torch.ops.lowbit.gated_delta_rule
delta_row = fixture_of(testing.rows("gated_delta_rule"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
SHAPES = [
    (1, 1, 1, 1, 1, 1), (2, 1, 2, 2, 16, 16), (1, 1, 1, 3, 33, 130), (3, 2, 1, 1, 3, 15), (1, 11, 2, 4, 17, 31),
    (2, 12, 1, 1, 16, 32), (1, 13, 3, 3, 15, 33), (2, 25, 1, 2, 31, 48), (1, 67, 2, 4, 128, 128), (1, 40, 5, 5, 64, 1),
    (5, 0, 2, 2, 8, 8), (0, 3, 1, 1, 8, 8),
]  # fmt: skip
"""B, T, Hk, Hv, Dk, Dv"""


def made(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, per_channel: bool = False, with_state: bool = True,
    strong: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A call whose keys have about the norm 1."""
    batch, tokens, key_heads, heads, dk, dv = shape
    of_g = (batch, tokens, heads, dk) if per_channel else (batch, tokens, heads)
    return {
        "q": torch.randn(batch, tokens, key_heads, dk).to(dtype),
        "k": (torch.randn(batch, tokens, key_heads, dk) / dk**0.5).to(dtype),
        "v": torch.randn(batch, tokens, heads, dv).to(dtype),
        "g": -torch.rand(of_g) * (20 if strong else 0.3),
        "beta": torch.rand(batch, tokens, heads).to(dtype),
        "state": torch.randn(batch, heads, dk, dv) if with_state else None,
    }


def assert_computed(results: tuple[Tensor, Tensor], call: dict[str, Any], what: str = "") -> None:
    """Within the roundings of the sums, and of o to its dtype."""
    out, state = results
    wanted, wanted_state = reference.gated_delta_rule(**call)
    error, error_state = reference.roundings(**call)
    roundoff = testing.ROUNDOFF[str(out.dtype).removeprefix("torch.")]
    assert out.dtype == call["v"].dtype and state.dtype == torch.float32
    assert out.is_contiguous() and state.is_contiguous() and state.shape == wanted_state.shape
    error = U * error
    testing.assert_within(
        out,
        wanted,
        error + roundoff * (wanted.abs() + error) + 1e-30 + roundoff * torch.finfo(out.dtype).smallest_normal,
        what=f"o of {what}",
    )
    testing.assert_within(state, wanted_state, U * error_state + 1e-30, what=f"state of {what}")


@pytest.mark.core
@pytest.mark.parametrize("per_channel", [False, True])
def test_every_row_is_within_the_roundings_of_its_sums(
    delta_row: str, per_channel: bool, subtests: pytest.Subtests
) -> None:
    torch.manual_seed(0)
    for number, shape in enumerate(SHAPES):
        for l2norm in (False, True):
            call = made(
                shape, DTYPES[number % 3], per_channel=per_channel, with_state=number % 2 == 0, strong=number % 4 == 3
            )
            call |= {"l2norm": l2norm, "scale": None if l2norm else 0.5}
            with subtests.test(shape=shape, l2norm=l2norm):
                with forced(delta_row):
                    results = lowbit.gated_delta_rule(**call)
                assert_computed(results, call, delta_row)


@pytest.mark.parametrize("per_channel", [False, True])
def test_packed_sequences_are_those_sequences(delta_row: str, per_channel: bool) -> None:
    """To the bit, with the states of each; a sequence without tokens keeps its state."""
    call = made((1, 45, 1, 2, 24, 20), per_channel=per_channel)
    ends = [0, 1, 14, 14, 20, 45]
    state = torch.randn(5, 2, 24, 20)
    for dtype in (torch.int32, torch.int64):
        with forced(delta_row):
            out, last = lowbit.gated_delta_rule(
                **call | {"state": state, "cu_seqlens": torch.tensor(ends, dtype=dtype)}
            )
        for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            part = {name: tensor[:, begin:end] for name, tensor in call.items() if name != "state"}
            with forced(delta_row):
                one, one_state = lowbit.gated_delta_rule(**part, state=state[n : n + 1])
            assert out[:, begin:end].equal(one) and last[n].equal(one_state[0])
        assert last[2].equal(state[2])
    assert_computed((out, last), call | {"state": state, "cu_seqlens": torch.tensor(ends)}, delta_row)


@pytest.mark.parametrize("lengths", [(30, 20), (1,) * 9, (13, 1, 2, 1)], ids=str)
def test_a_state_goes_on(delta_row: str, lengths: tuple[int, ...]) -> None:
    """A prompt in parts, and token by token, is within the budget of the whole; the given state is not changed."""
    call = made((2, sum(lengths), 1, 2, 32, 40))
    state, outs, at = call["state"], [], 0
    before = state.clone()
    for length in lengths:
        part = {name: tensor[:, at : at + length] for name, tensor in call.items() if name != "state"}
        with forced(delta_row):
            out, state = lowbit.gated_delta_rule(**part, state=state)
        outs.append(out)
        at += length
    assert_computed((torch.cat(outs, 1), state), call, delta_row)
    assert call["state"].equal(before)


@pytest.mark.parametrize("per_channel", [False, True])
def test_padding_on_the_left_leaves_the_state_to_the_bit(delta_row: str, per_channel: bool) -> None:
    call = made((2, 29, 2, 2, 16, 24), per_channel=per_channel)
    call["g"][:], call["beta"][:] = 0, 0
    for tokens in (29, 12, 1):
        part = {name: tensor[:, :tokens] for name, tensor in call.items() if name != "state"}
        with forced(delta_row):
            out, state = lowbit.gated_delta_rule(**part, state=call["state"])
            assert state.equal(call["state"])
            assert not lowbit.gated_delta_rule(**part)[1].any()
        assert out.isfinite().all()


def test_the_bits_do_not_depend_on_threads(subtests: pytest.Subtests) -> None:
    for shape in ((1, 300, 4, 8, 64, 64), (3, 40, 1, 1, 128, 128), (2, 1, 8, 16, 128, 128), (1, 1, 1, 1, 128, 512)):
        for per_channel in (False, True):
            call = made(shape, per_channel=per_channel)
            with subtests.test(shape=shape, per_channel=per_channel):
                same_for_any_threads(lambda: lowbit.gated_delta_rule(**call, l2norm=True), counts=(1, 2, 3, 7))  # noqa: B023


def test_any_strides() -> None:
    """As a layer has them: parts of one projection, heads before tokens, states that are transposed."""
    joined = torch.randn(2, 9, 2 * 16 + 2 * 16 + 4 * 8)
    q, k, v = joined.split([32, 32, 32], -1)
    call = made((2, 9, 2, 4, 16, 8)) | {
        "q": q.unflatten(-1, (2, 16)),
        "k": k.unflatten(-1, (2, 16)) / 4,
        "v": v.unflatten(-1, (4, 8)),
    }
    call["g"], call["beta"] = (
        call["g"].transpose(1, 2).contiguous().transpose(1, 2),
        call["beta"][:, :1].expand(-1, 9, -1),
    )
    call["state"] = call["state"].mT.contiguous().mT
    dense = {name: tensor.contiguous() for name, tensor in call.items()}
    for ours, theirs in zip(lowbit.gated_delta_rule(**call), lowbit.gated_delta_rule(**dense), strict=True):
        assert ours.equal(theirs)


def test_a_strong_decay_forgets_and_does_not_overflow(delta_row: str) -> None:
    for per_channel in (False, True):
        call = made((1, 30, 1, 1, 16, 16), per_channel=per_channel)
        call["g"][:, 7::9] = -1e30
        call["state"] *= 1e10
        with forced(delta_row):
            results = lowbit.gated_delta_rule(**call)
        assert_computed(results, call, delta_row)
        assert results[1].abs().max() < 100


def test_tiny_and_zero_rows_are_normalized_with_the_epsilon(delta_row: str) -> None:
    call = made((1, 5, 1, 1, 16, 16)) | {"l2norm": True}
    call["k"] *= torch.tensor([0, 1e-20, 1e-4, 1e-3, 1e15])[:, None, None]
    call["q"] *= torch.tensor([1e-3, 0, 1e-4, 1e15, 1e-20])[:, None, None]
    with forced(delta_row):
        results = lowbit.gated_delta_rule(**call)
    assert_computed(results, call, delta_row)


def test_nan_stays_in_its_head_and_its_columns(delta_row: str) -> None:
    call = made((1, 30, 2, 4, 16, 40))
    clean = lowbit.gated_delta_rule(**call)
    call["k"][0, 20, 1, 3], call["v"][0, 25, 0, 7] = torch.nan, torch.inf
    with forced(delta_row):
        clean = lowbit.gated_delta_rule(**call | {"k": call["k"].nan_to_num(), "v": call["v"].nan_to_num(posinf=1)})
        out, state = lowbit.gated_delta_rule(**call)
    assert out[0, 29, 2:].isnan().all() and state[0, 2:].isnan().all() and not out[0, 29, 0, 7].isfinite()
    rest = [i for i in range(40) if i != 7]
    assert out[:, :, 1].equal(clean[0][:, :, 1]) and out[0, :, 0, rest].equal(clean[0][0, :, 0, rest])
    assert out[:, :12].equal(clean[0][:, :12])


def test_the_functions_of_transformers_agree() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    call = made((2, 70, 2, 4, 32, 48))
    names = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta", "state": "initial_state"}
    renamed = {names[name]: tensor for name, tensor in call.items()}
    for function in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        out, state = function(**renamed, output_final_state=True, use_qk_l2norm_in_kernel=True)
        for our, their in zip(lowbit.gated_delta_rule(**call, l2norm=True), (out, state), strict=True):
            torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


GOOD = made((2, 3, 2, 4, 8, 6))
PACKED = made((1, 6, 2, 2, 8, 8), with_state=False)


@pytest.mark.parametrize("change, error, text", [
    ({"q": torch.randn(2, 3, 2, 8).double()}, TypeError, "q must be float32, bfloat16 or float16, got float64"),
    ({"q": torch.randn(2, 3, 16)}, ValueError, r"q must have shape \[B, T, Hk, Dk\], Hk and Dk at least 1, got \[2, 3, 16\]"),
    ({"q": torch.randn(2, 3, 2, 7)}, ValueError, r"k must have shape \[2, 3, 2, 7\], got \[2, 3, 2, 8\]"),
    ({"k": torch.randn(2, 4, 2, 8)}, ValueError, r"k must have shape \[2, 3, 2, 8\], got \[2, 4, 2, 8\]"),
    ({"k": torch.randn(2, 3, 2, 8).bfloat16()}, TypeError, "k must be float32, got bfloat16"),
    ({"v": torch.randn(2, 3, 4, 6).half()}, TypeError, "v must be float32, got float16"),
    ({"v": torch.randn(2, 3, 4)}, ValueError, r"v must have shape \[B, T, Hv, Dv\], Hv and Dv at least 1, got \[2, 3, 4\]"),
    ({"v": torch.randn(2, 3, 3, 6)}, ValueError, "the heads of v must be a multiple of the 2 heads of q and k, got 3"),
    ({"v": torch.randn(2, 2, 4, 6)}, ValueError, r"v must have shape \[2, 3, 4, 6\], got \[2, 2, 4, 6\]"),
    ({"g": torch.zeros(2, 3, 2)}, ValueError, r"g must have shape \[2, 3, 4\], got \[2, 3, 2\]"),
    ({"g": torch.zeros(2, 3, 4, 6)}, ValueError, r"g must have shape \[2, 3, 4, 8\], got \[2, 3, 4, 6\]"),
    ({"g": torch.zeros(2, 3, 4).double()}, TypeError, "g must be float32, bfloat16 or float16, got float64"),
    ({"beta": torch.zeros(2, 3, 4, 8)}, ValueError, r"beta must have shape \[2, 3, 4\], got \[2, 3, 4, 8\]"),
    ({"beta": torch.zeros(2, 3, 4, dtype=torch.int32)}, TypeError, "beta must be float32, bfloat16 or float16, got int32"),
    ({"state": torch.zeros(2, 4, 6, 8)}, ValueError, r"state must have shape \[2, 4, 8, 6\], got \[2, 4, 6, 8\]"),
    ({"state": torch.zeros(2, 4, 8, 6).half()}, TypeError, "state must be float32 or bfloat16, got float16"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"q must have shape \[1, T, Hk, Dk\] with cu_seqlens, got \[2, 3, 2, 8\]"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens must have shape \[N \+ 1\], got \[0\]"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"gated_delta_rule: {text}")


@pytest.mark.parametrize(
    "value, shown", [(0.5, "0.5"), (torch.nan, "nan"), (-torch.inf, "-inf"), (torch.inf, "inf"), (1e-40, "9.99995e-41")]
)
def test_a_g_that_is_no_decay_is_named_with_its_place(delta_row: str, value: float, shown: str) -> None:
    for dtype in DTYPES if abs(value) > 1e-30 else DTYPES[:1]:
        call = made((2, 90, 1, 3, 8, 6)) | {"g": torch.zeros(2, 90, 3, dtype=dtype)}
        call["g"][1, 40, 2], call["g"][1, 70, 0] = value, value
        with (
            pytest.raises(
                ValueError, match=rf"gated_delta_rule: g must be finite and at most 0, .* got {shown} at \[1, 40, 2\]"
            ),
            forced(delta_row),
        ):
            lowbit.gated_delta_rule(**call)
        call["g"] = -torch.zeros(2, 90, 8, 3, dtype=dtype).mT
        call["g"][0, 89, 1, 7] = value
        with pytest.raises(ValueError, match=rf"got {shown} at \[0, 89, 1, 7\]"), forced(delta_row):
            lowbit.gated_delta_rule(**call)


@pytest.mark.parametrize("ends, text", [
    ([1, 6], r"cu_seqlens\[0\] = 1"),
    ([0, 4, 3, 6], r"cu_seqlens\[2\] = 3 after 4"),
    ([0, 4], r"cu_seqlens\[1\] = 4 after 0"),
    ([0, 8, 6], r"cu_seqlens\[2\] = 6 after 8"),
    ([0], r"cu_seqlens\[0\] = 0"),
    ([0, -1, 6], r"cu_seqlens\[1\] = -1 after 0"),
])  # fmt: skip
def test_lengths_that_do_not_add_up_are_named(ends: list[int], text: str) -> None:
    with pytest.raises(
        ValueError, match=f"gated_delta_rule: cu_seqlens must rise from 0 to the 6 tokens of q, got {text}"
    ):
        lowbit.gated_delta_rule(**PACKED | {"cu_seqlens": torch.tensor(ends)})


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, number: int) -> None:
    call = made((1, 5, 1, 2, 8, 6), dtype, per_channel=number == 1, with_state=number == 0)
    ends = torch.tensor([0, 2, 5]) if number == 2 else None
    torch.library.opcheck(op.default, (*call.values(), True, 0.5, ends))


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []
    compiled = torch.compile(
        lambda call: lowbit.gated_delta_rule(**call, l2norm=True), fullgraph=True, dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for tokens in (3, 5, 17):
        call = made((2, tokens, 1, 2, 8, 6))
        for ours, theirs in zip(compiled(call), lowbit.gated_delta_rule(**call, l2norm=True), strict=True):
            assert ours.equal(theirs)
    assert len(graphs) == 1
