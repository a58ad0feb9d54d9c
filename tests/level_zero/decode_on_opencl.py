# SPDX-License-Identifier: Apache-2.0
"""Calls of decode, kv_quantize and kv_dequantize by the modules of csrc/level_zero on OpenCL: what
csrc/level_zero/decode/rows.cpp launches."""

from __future__ import annotations

import struct
from typing import Any

import torch
from attention_on_opencl import DTYPES, SUB_GROUPS, at, launch, rows_of
from torch import Tensor

KINDS = {torch.int8: 1, torch.uint8: 2}
SCALES = {torch.float32: 0, torch.float16: 2}
SPLIT = 256
KV_ROWS = "8qi2b2x2i"


def padded(columns: int) -> int:
    return -(-columns // 32) * 32


def rotation(columns: int) -> int:
    return padded(columns) & -padded(columns)


def kv_rows(rows: Tensor, scale: Tensor | None, columns: int) -> list[int]:
    dtype, of_scale = DTYPES.get(rows.dtype, 9), 9 if scale is None else SCALES[scale.dtype]
    return [*rows_of(rows), *rows_of(scale), KINDS.get(rows.dtype, 0), dtype, of_scale, columns, padded(columns)]


def decode(q: Tensor, columns: int, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return out and lse; `columns` of out."""
    k, v, mask, sink = call["k"], call["v"], call.get("mask"), call.get("sink")
    (batch, heads, length, e), (kv_heads, keys) = q.shape, k.shape[1:3]
    group, splits = heads // kv_heads, -(-keys // SPLIT)
    tiles, most = -(-group * length // SUB_GROUPS), max(e, columns)
    out, lse = torch.full((batch, heads, length, columns), 7.0, dtype=q.dtype), torch.full((batch, heads, length), 7.0)
    partial = torch.full((batch * heads * length * splits * (columns + 2),), torch.nan)
    argument = struct.pack(
        f"<8q{KV_ROWS}{KV_ROWS}2b2x7i2qf?3xi4x3Q4q2QQ", *rows_of(q), *rows_of(out), *kv_rows(k, call.get("k_scale"), e),
        *kv_rows(v, call.get("v_scale"), columns), DTYPES[q.dtype], 9 if mask is None else DTYPES[mask.dtype], batch, heads, group, length, keys, tiles,
        splits, call.get("position", 0), call.get("window", 0), call["scale"], call.get("causal", False), rotation(e) if call.get("rotated") else 0,
        at(lse), at(sink), at(mask), *([0] * 4 if mask is None else mask.stride()), 0, 0, at(partial),
    )  # fmt: skip
    most = padded(most) if k.dtype in KINDS else most
    kernel = f"decode_{64 if most <= 64 else 128 if most <= 128 else 256}"
    launch("decode", kernel, batch * kv_heads * tiles * splits, argument)
    launch("kv_codes", "decode_combine", -(-batch * heads * length // SUB_GROUPS), argument)
    return out, lse


def convert(kernel: str, x: Tensor, codes: Tensor, scale: Tensor, rotates: bool) -> None:
    """kv_quantize writes codes and scale, kv_dequantize x."""
    batch, heads, length, columns = x.shape
    argument = struct.pack(f"<4q{KV_ROWS}b3x4i4x", *rows_of(x), *kv_rows(codes, scale, columns), DTYPES[x.dtype], batch, heads, length,
                           rotation(columns) if rotates else 0)  # fmt: skip
    launch("kv_codes", kernel, -(-batch * heads * length // SUB_GROUPS), argument)
