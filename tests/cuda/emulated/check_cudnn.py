# SPDX-License-Identifier: Apache-2.0
"""What surrounds a plan of cuDNN on the emulated GPU: rows that a mask hides are cleared, other calls are refused by name.
Plans themselves run on a GPU alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_calls import AttentionCase
from attention_calls import make_data as attention_data
from attention_calls import run as run_attention
from cudnn_calls import BF16, FP16, Call, ask, make
from decode_calls import DecodeCase
from decode_calls import make_data as decode_data
from decode_calls import run as run_decode

from lowbit import _C
from lowbit.devices import simulated

simulated.enable()
DEVICE = "lowbit_sim:1"

HIDDEN = [
    Call("every row and head", "attention_forward", (2, 3, 3, 37, 70, 24, 40), mask=(2, 3, 37, 70)),
    Call("causal, one mask for all heads", "attention_forward", (2, 4, 2, 37, 37, 16, 16), FP16, True, mask=(2, 1, 37, 37), mask_dtype=torch.float32),
    Call("keys hidden from all rows", "attention_forward", (2, 2, 2, 5, 100, 16, 300), mask=(2, 1, 1, 100), mask_dtype=FP16, lse=False),
    Call("a chunk over a cache", "decode", (2, 4, 2, 9, 100, 16, 16), causal=True, position=80, mask=(2, 4, 9, 100)),
    Call("a chunk in a window", "decode", (1, 4, 2, 9, 100, 16, 16), causal=True, position=80, window=3, mask=(1, 4, 9, 100), mask_dtype=torch.float32),
    Call("one query", "decode", (3, 2, 2, 1, 100, 16, 16), causal=True, position=60, window=40, mask=(3, 1, 1, 100)),
]  # fmt: skip


def visible(call: Call) -> torch.Tensor:
    """What causality and the window leave, [queries, keys]."""
    queries, keys = call.sizes[3:5]
    q, k = torch.arange(queries)[:, None] + call.position, torch.arange(keys)
    return (k <= (q if call.causal else keys)) & (k > (q - call.window if call.window else -1))


@pytest.mark.parametrize("call", HIDDEN, ids=str)
def test_rows_that_a_mask_hides_are_cleared_and_no_others(call: Call) -> None:
    torch.manual_seed(0)
    tensors = make(call, DEVICE)
    stored = (torch.randn(call.mask) * 5).masked_fill(torch.rand(call.mask) < 0.9, -torch.inf).to(call.mask_dtype)
    hides = torch.rand(call.mask[:3]) < 0.3
    stored[hides] = -torch.inf
    stored[0, 0, 0], stored[-1, -1, -1] = -torch.inf, 0.0
    tensors["mask"] = stored.to(DEVICE).expand(tensors["mask"].shape)
    for name in ("out", "lse"):
        if name in tensors:
            tensors[name].fill_(torch.nan)
    ask(call, tensors, clear=True)
    batch, heads, _, queries, keys, *_ = call.sizes
    hidden = ((stored.float() == -torch.inf) | ~visible(call)).expand(batch, heads, queries, keys).all(-1)
    assert 0 < hidden.sum() < hidden.numel()
    out = tensors["out"].cpu().float()
    assert torch.equal(out == 0, hidden[..., None].expand_as(out)) and torch.equal(out.isnan(), ~hidden[..., None].expand_as(out))
    if call.lse:
        lse = tensors["lse"].cpu()
        assert torch.equal(lse == -torch.inf, hidden) and torch.equal(lse.isnan(), ~hidden)


PLAIN = AttentionCase("", (1, 2, 1, 70, 50, 64, 64))
FORWARD = "attention_forward_bias_cudnn"


@pytest.mark.parametrize("row", [FORWARD, "attention_forward_cudnn"])
def test_without_a_device_of_its_own_cudnn_refuses_and_other_rows_serve(row: str) -> None:
    """Whether its library is there or not."""
    with pytest.raises(NotImplementedError, match=f"{row}_sim: .*(cudnnCreate failed|libcudnn|headers of cuDNN)"):
        run_attention(PLAIN, attention_data(PLAIN), DEVICE, "_sim", (row, None))
    q = torch.zeros(1, 2, 70, 64, dtype=BF16).to(DEVICE)
    torch.ops.lowbit.attention_forward(q, q, q, 1.0, False, None, 0.0, None, [], [], [], [], [], [0, 0], None, False, False)
    assert "cudnn" not in _C.last_kernel("attention_forward")


@pytest.mark.parametrize(
    "row, options, words",
    [
        ("attention_forward_cudnn", {"bias": BF16}, "a mask: rows that it hides whole have to be 0"),
        (FORWARD, {"bias": torch.bool}, "a bool mask: cuDNN adds floats"),
        (FORWARD, {"dropout_p": 0.5}, "dropout: its random numbers are not those of the op"),
        (FORWARD, {"mask_mod": lambda b, h, q, k: q >= k}, "a mask_mod or block mask"),
        (FORWARD, {"score_mod": lambda s, b, h, q, k: s * 2}, "a score_mod"),
        (FORWARD, {"sink": True}, "a sink"),
    ],
)
def test_what_cudnn_would_do_in_another_way_is_refused_by_name(row: str, options: dict[str, object], words: str) -> None:
    case = replace(PLAIN, **options)
    with pytest.raises(NotImplementedError, match=f"{row}_sim: {words}"):
        run_attention(case, attention_data(case), DEVICE, "_sim", (row, None))


CACHE = DecodeCase("", (1, 2, 1, 3, 300, 64, 64), BF16, options={"causal": True, "position": 200})


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"cache": "int8"}, "a cache of codes"),
        ({"options": {"causal": True, "position": 299}}, "queries behind the last key"),
        ({"options": {"causal": True, "position": -1}}, "queries before the first key"),
        ({"options": {"position": 400, "window": 50}}, "a window behind the last key"),
        ({"options": {"position": 200, "window": 50}}, "a window without causality"),
        ({"mask_mod": lambda b, h, q, k: k % 2 == 0}, "a mask_mod"),
    ],
)
def test_what_it_cannot_do_over_a_cache_is_refused_by_name(changed: dict[str, object], words: str) -> None:
    case = replace(CACHE, **changed)
    with pytest.raises(NotImplementedError, match=f"decode_cudnn_sim: {words}"):
        run_decode(case, decode_data(case), DEVICE, "_sim", row="decode_cudnn")
