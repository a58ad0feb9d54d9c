# SPDX-License-Identifier: Apache-2.0
"""Calls of every row for NVIDIA GPUs at the sizes of real models: several tiles for a warp, splits of k, more CTAs than a GPU runs at once.

A weight of thousands of columns is a few, repeated, so that the float64 reference takes no longer than that of a small one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_calls import AttentionCase
from decode_calls import DecodeCase, row_of

from lowbit import _C, testing
from lowbit.testing import LinearCase, LinearData

DEVICE, SUFFIX = "cuda", ""
COLUMNS, TIMES, K = 112, 37, 4096  # 4144 columns; 7 panels are no power of 2, by which a wrong column would be right again
BF16, FP16 = torch.bfloat16, torch.float16
MANY_ROWS = {  # row -> format, activations, numbers of rows
    "linear_wgmma_cuda": ("int4", "float", (40, 100, 500)),
    "linear_decoded_cublas": ("int4", "float", (128, 2048)),
    "linear_codes_cublas": ("int8", "int8_row", (256, 2048)),
    "linear_code_tiles_cuda": ("int4", "int8_row", (130, 700)),
}
ATTENTION = {  # forward and backward -> a call; of one query, and of whole prompts
    ("attention_forward_decode_bfloat16_cuda", "attention_backward_tiles_cuda"): AttentionCase("one query", (2, 32, 8, 1, 8192, 128, 128)),
    ("attention_forward_decode_float16_cuda", "attention_backward_tiles_cuda"): AttentionCase("one query", (2, 32, 8, 1, 8192, 64, 64), FP16),
    ("attention_forward_tiles_cuda", "attention_backward_tiles_cuda"): AttentionCase("a prompt", (1, 4, 2, 2048, 2048, 128, 128), causal=True),
    ("attention_forward_wgmma_cuda", "attention_backward_wgmma_cuda"): AttentionCase("a prompt", (1, 4, 2, 2048, 2048, 128, 128), causal=True),
    ("attention_forward_bias_cudnn", "attention_backward_tiles_cuda"): AttentionCase("a prompt with a float mask", (1, 4, 2, 2048, 2048, 128, 128), bias=BF16),
    ("attention_forward_cudnn", "attention_backward_cudnn"): AttentionCase("a prompt", (1, 4, 2, 2048, 2048, 128, 128), causal=True),
}
DECODE = [
    case
    for cache, dtype in (("int8", BF16), ("int4", BF16), (BF16, BF16), (FP16, FP16))
    for case in (
        DecodeCase(f"{cache}, a step", (2, 32, 8, 1, 16384, 128, 128), cache, dtype, {"causal": True, "position": 16383}),
        DecodeCase(f"{cache}, a prompt", (1, 8, 2, 512, 2560, 128, 128), cache, dtype, {"causal": True, "position": 2048}),
    )
] + [
    DecodeCase(f"{cache}, a prompt by tiles", (1, 8, 2, 512, 2560, 128, 128), cache, dtype, {"causal": True, "position": 2048, "window": window}, prompt=True)
    for cache, dtype, window in (("int8", BF16, 0), ("int4", BF16, 1024), (BF16, BF16, 0), (FP16, FP16, 1024))
]
DECODE_BY_CUDNN = [case for case in DECODE if case.cache in (BF16, FP16) and not case.prompt]


def linear_cases(row: str, k: int = K) -> list[LinearCase]:
    """Calls of the row of this name; each with its few columns."""
    if row in MANY_ROWS:
        format, x_format, rows = MANY_ROWS[row]
    else:
        format = row.removeprefix("linear_").removesuffix("_cuda")
        x_format = "int8_row" if format.endswith("_int8") else "float"
        format, rows = format.removesuffix("_int8"), (1, 8, 33, 100)
    dtype = format if format in testing.DTYPES else "bfloat16"
    group_size = 0 if _C.FORMAT_FACTS[format]["kind"] == "float" or row == "linear_codes_cublas" else 128
    return [LinearCase(m, COLUMNS, k, dtype, format, group_size, "symmetric", x_format, "float32", "silu", True, True) for m in rows]


def repeated(case: LinearCase, data: LinearData, times: int = TIMES) -> tuple[LinearCase, LinearData]:
    """The call with each of its columns `times` times."""
    columns = {name: getattr(data, name).repeat(1, times) for name in ("mul", "add", "wanted", "allowed")}
    there = replace(data, packed=data.packed.repeat(times, *[1] * (data.packed.dim() - 1)), bias=data.bias.repeat(times), **columns)
    return replace(case, n=case.n * times), there


def rows(op: str) -> list[str]:
    return [row["name"] for row in _C.kernels(op) if row["device"] == "cuda"]


def decode_rows() -> set[str]:
    return {row_of(case) for case in DECODE} | {"decode_cudnn"}
