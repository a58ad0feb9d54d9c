# SPDX-License-Identifier: Apache-2.0
"""Refusals of flex_attention: torch's kind of error, naming the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit import AuxRequest, create_block_mask, flex_attention


def arguments(**change: Any) -> dict[str, Any]:
    tensors = {name: torch.randn(2, 4, 64, 16) for name in ("query", "key", "value")}
    return tensors | change


def causal(length: int = 64, batch: int | None = None, heads: int | None = None) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, batch, heads, length, length, BLOCK_SIZE=32)


BIAS = torch.randn(64, requires_grad=True)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": 3}, TypeError, "query must be a tensor, got int"),
        ({"query": torch.randn(4, 64, 16)}, NotImplementedError, "must be 4D tensors"),
        ({"value": torch.zeros(2, 4, 64, 16, dtype=torch.int32)}, TypeError, "value must be float32, bfloat16, float16 or float64, got int32"),
        ({"query": torch.zeros(2, 4, 64, 16, dtype=torch.int32)}, TypeError, "query must be float32"),
        ({"key": torch.randn(2, 4, 64, 8)}, ValueError, "same embedding dimension but got E=16 and E=8"),
        ({"value": torch.randn(2, 4, 63, 16)}, ValueError, "value must have batch, heads and length of key"),
        ({"query": torch.randn(2, 8, 64, 16)}, ValueError, "same number of heads but got Hq=8 and Hkv=4"),
        ({"query": torch.randn(2, 6, 64, 16), "enable_gqa": True}, ValueError, "multiple of kv heads for GQA but got Hq=6 and Hkv=4"),
        ({"query": torch.randn(3, 4, 64, 16)}, ValueError, "same batch size, or non-none block_mask"),
        ({"query": torch.randn(3, 4, 64, 16), "block_mask": causal()}, ValueError, "B_block_mask=1"),
        ({"block_mask": causal(32)}, ValueError, "for a smaller length"),
        ({"block_mask": causal(128)}, ValueError, "for a larger length"),
        ({"block_mask": causal(64, None, 3)}, ValueError, "block_mask must have head size 1 or 4 or more, got 3"),
        ({"block_mask": causal(64, 2, 4)[0:1]}, RuntimeError, "Cannot use mask_mod from a sliced BlockMask"),
        ({"block_mask": torch.ones(64, 64)}, TypeError, "block_mask must be a BlockMask"),
        ({"score_mod": 1}, TypeError, "score_mod must be callable, got int"),
        ({"score_mod": lambda b, h, q, k: q}, TypeError, "score_mod must take .* got a function of 4 positional arguments"),
        ({"score_mod": lambda s, b, h, q, k: s + torch.zeros(10)[k]}, IndexError, "score_mod reads index"),
        ({"block_mask": create_block_mask(lambda b, h, q, k: BIAS.detach()[q] < 9, None, None, 64, 64)}, None, ""),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "Cannot specify both return_lse and return_aux"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"sink": torch.randn(3)}, ValueError, r"sink must be floating, \[4\]"),
        ({"cu_seqlens": torch.tensor([0, 30, 20, 64])}, ValueError, "cu_seqlens must ascend from 0 to the length 64"),
        ({"cu_seqlens": torch.tensor([0, 30])}, ValueError, "cu_seqlens must ascend from 0 to the length 64"),
        ({"sink": [1.0] * 4}, TypeError, r"sink must be a tensor \[4\], got list"),
        ({"scale": "large"}, TypeError, "scale must be a number, got str"),
        ({"return_aux": True}, TypeError, "return_aux must be an AuxRequest, got bool"),
        ({"cu_seqlens": [0, 64]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 64.0])}, ValueError, "cu_seqlens must be int32 or int64"),
    ],
)  # fmt: skip
def test_bad_input(change: dict[str, Any], error: type[Exception] | None, text: str) -> None:
    if error is None:
        flex_attention(**arguments(**change))
        return
    with pytest.raises(error, match=text):
        flex_attention(**arguments(**change))


def test_a_mask_may_not_learn() -> None:
    with pytest.raises(RuntimeError, match="Captured buffers from mask mod that require grad are not supported"):
        create_block_mask(lambda b, h, q, k: BIAS[q] > 0, None, None, 64, 64)


def test_return_lse_warns_and_options_are_taken() -> None:
    with pytest.warns(FutureWarning, match="return_lse is deprecated"):
        out, lse = flex_attention(**arguments(), return_lse=True, kernel_options={"BLOCK_M": 32, "num_stages": 2})
    assert lse.shape == (2, 4, 64) and out.shape == (2, 4, 64, 16)


@pytest.mark.parametrize(("length", "kv_length"), [(0, 5), (5, 0), (1, 1), (0, 0)])
def test_empty_and_single(length: int, kv_length: int) -> None:
    q = torch.randn(1, 2, length, 8, requires_grad=True)
    k, v = (torch.randn(1, 2, kv_length, 8, requires_grad=True) for _ in range(2))
    out, aux = flex_attention(q, k, v, lambda s, b, h, i, j: s * 2, return_aux=AuxRequest(lse=True))
    assert out.shape == (1, 2, length, 8) and aux.lse.shape == (1, 2, length)
    if not kv_length:
        assert (out == 0).all() and (aux.lse == -torch.inf).all()
    out.sum().backward()
