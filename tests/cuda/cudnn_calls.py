# SPDX-License-Identifier: Apache-2.0
"""Calls of ops that cuDNN can plan besides plain attention: a float mask, few queries, a window over a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests import internals
from torch import Tensor

NAMES = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v", "lse", "mask")
"""The tensors of a plan, by number."""


@dataclass(frozen=True)
class Call:
    name: str
    op: str
    sizes: tuple[int, int, int, int, int, int, int]  # batch, heads, kv_heads, queries, keys, e, ev
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    position: int = 0
    window: int = 0
    mask: tuple[int, int, int, int] | None = None
    mask_dtype: torch.dtype = torch.bfloat16
    lse: bool = True

    def __str__(self) -> str:
        return self.name


def make(call: Call, device: str = "cpu") -> dict[str, Tensor]:
    """Heads lie behind each other in a position, as a model's projections leave them."""
    batch, heads, kv_heads, queries, keys, e, ev = call.sizes
    shapes = {"q": (heads, queries, e), "k": (kv_heads, keys, e), "v": (kv_heads, keys, ev), "out": (heads, queries, ev)}
    tensors = {name: torch.zeros(batch, length, of, width, dtype=call.dtype, device=device).transpose(1, 2) for name, (of, length, width) in shapes.items()}
    if call.lse:
        tensors["lse"] = torch.zeros(batch, heads, queries, device=device)
    if call.mask:
        mask = torch.zeros(call.mask, dtype=call.mask_dtype, device=device)
        tensors["mask"] = mask.expand(batch, heads, queries, keys) if call.op == "decode" else mask
    return tensors


def ask(call: Call, tensors: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    return internals.cudnn_call(call.op, **tensors, causal=call.causal, position=call.position, window=call.window, **options)


BF16, FP16 = torch.bfloat16, torch.float16
CALLS = [
    Call("a float mask", "attention_forward", (2, 16, 8, 1024, 1024, 128, 128), mask=(2, 16, 1024, 1024)),
    Call("a mask for all heads, causal", "attention_forward", (2, 8, 8, 300, 300, 64, 64), FP16, True, mask=(2, 1, 300, 300), mask_dtype=FP16),
    Call("a mask in float32 for all batches", "attention_forward", (2, 8, 2, 128, 256, 64, 64), mask=(1, 8, 128, 256), mask_dtype=torch.float32),
    Call("few queries", "attention_forward", (2, 16, 8, 5, 1024, 128, 128)),
    Call("one query of attention", "attention_forward", (2, 16, 8, 1, 4096, 128, 128), lse=False),
    Call("one query over a cache", "decode", (2, 16, 8, 1, 4096, 128, 128), causal=True, position=4000, lse=False),
    Call("one query, a window", "decode", (2, 16, 8, 1, 4096, 128, 128), causal=True, position=4000, window=1024),
    Call("one query, a mask", "decode", (2, 16, 8, 1, 1024, 128, 128), causal=True, position=1000, mask=(2, 1, 1, 1024)),
    Call("a chunk of a prompt", "decode", (1, 16, 8, 512, 4096, 128, 128), FP16, True, 2048),
    Call("a chunk, a window", "decode", (1, 16, 8, 512, 4096, 128, 128), causal=True, position=2048, window=1024),
    Call("a chunk, a mask", "decode", (1, 8, 8, 130, 1000, 64, 64), mask=(1, 8, 130, 1000)),
]  # fmt: skip
