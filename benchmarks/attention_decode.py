# SPDX-License-Identifier: Apache-2.0
"""Decoding: one query of 32 heads over 8 kv heads, batch 1, caches that do not fit L3; and a prompt with
a quantized cache.

Head-major is [B, H, S, D]; token-major [B, S, H, D] seen as the same. GB/s: bytes of keys, values and scales, against
what the machine reads with 4 prefetched streams a thread in the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from ggml_attention import CACHES, GgmlAttention
from ggml_linear import Library
from harness import MIB, duration, interleave, rotate, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import lowbit
from lowbit import _C

Q_HEADS, KV_HEADS = 32, 8
COLD_BYTES = 160 * MIB  # five times the L3 of the machine of the results
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lengths = args.decode_lengths or ((16384,) if args.quick else (4096, 16384))
    for head_dim in (64,) if args.quick else (64, 128):
        for length in lengths:
            for token_major in (False, True):
                rows += _shape(args, head_dim, length, token_major)
    return rows if args.decode_lengths else rows + _prompt(args)


def _shape(args: argparse.Namespace, head_dim: int, length: int, token_major: bool) -> list[dict[str, Any]]:
    candidates: dict[str, tuple[Callable[[], object], int]] = {}
    for name in FORMATS:
        candidates[name] = _ours(name, head_dim, length, token_major)
    for name in ("float32", "bfloat16"):
        candidates[f"torch {name}"] = _torch(name, head_dim, length, token_major)
    for library, cache in itertools.product(args.libraries, CACHES):
        candidates[f"{library.name} {cache}"] = _ggml(library, cache, head_dim, length, token_major)
    bandwidth = 0.0
    times: dict[str, float] = {}
    for _ in range(args.rounds):
        bandwidth = max(bandwidth, _C.read_bandwidth(256 * MIB, 4, args.threads))
        sample = interleave({name: call for name, (call, _) in candidates.items()}, rounds=1, sample_s=0.03)
        times = {name: min(time.best_s, times.get(name, time.best_s)) for name, time in sample.items()}
    layout = "token-major" if token_major else "head-major"
    rows = [
        {
            "candidate": name, "head_dim": head_dim, "kv_length": length, "layout": layout, "threads": args.threads,
            "best_s": times[name],
            "bytes": size, "gb_per_s": size / times[name] / 1e9, "read_gb_per_s": bandwidth,
        }
        for name, (_, size) in candidates.items()
    ]  # fmt: skip
    cells = [
        [row["candidate"], duration(row["best_s"]), f"{row['gb_per_s']:.1f}",
         f"{100 * row['gb_per_s'] / bandwidth:.0f} %",
         f"{times['bfloat16'] / row['best_s']:.2f}x", f"{times['torch bfloat16'] / row['best_s']:.1f}x"]
        for row in rows
    ]  # fmt: skip
    title = f"decode D={head_dim} KV={length} {layout}, {args.threads} threads, {bandwidth:.1f} GB/s"
    print(f"\n{table([title, 'time', 'GB/s', 'of read', 'our bf16', 'torch bf16'], cells)}")
    return rows


def _layout(tensor: Tensor, token_major: bool) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if token_major else tensor


def _copies(size: int) -> int:
    return max(2, min(64, -(-COLD_BYTES // size)))


def _ours(name: str, head_dim: int, length: int, token_major: bool) -> tuple[Callable[[], object], int]:
    q, scale, calls, size = torch.randn(1, Q_HEADS, 1, head_dim), head_dim**-0.5, [], 0
    decode, plain = torch.ops.lowbit.decode.default, (False, 0, 0, head_dim)  # causal, position, window, v_columns
    for _ in range(64):
        k, v = torch.randn(2, 1, KV_HEADS, length, head_dim)
        if name in ("int8", "int4"):
            layer = lowbit.QuantizedKVCache(name).layer(0)
            layer.append(k, v)
            parts = (*layer._k.part(0, length), *layer._v.part(0, length))  # type: ignore[union-attr]
            tensors = [_layout(part, token_major) for part in parts]
            k, k_scale, v, v_scale = tensors
            calls.append(
                lambda k=k, v=v, a=k_scale, b=v_scale, rotated=layer.rotated: decode(
                    q, k, v, scale, a, b, rotated, *plain
                )
            )
        else:
            tensors = [_layout(x.to(getattr(torch, name)), token_major) for x in (k, v)]
            calls.append(lambda k=tensors[0], v=tensors[1]: decode(q, k, v, scale, None, None, False, *plain))
        size = sum(tensor.nbytes for tensor in tensors)
        if len(calls) >= _copies(size):
            break
    return rotate(calls), size


def _torch(name: str, head_dim: int, length: int, token_major: bool) -> tuple[Callable[[], object], int]:
    dtype, calls, size = getattr(torch, name), [], 0
    q = torch.randn(1, Q_HEADS, 1, head_dim).to(dtype)
    for _ in range(64):
        k, v = (_layout(x.to(dtype), token_major) for x in torch.randn(2, 1, KV_HEADS, length, head_dim))
        calls.append(lambda k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True))
        size = k.nbytes + v.nbytes
        if len(calls) >= _copies(size):
            break
    return rotate(calls), size


def _ggml(
    library: Library, cache: str, head_dim: int, length: int, token_major: bool
) -> tuple[Callable[[], object], int]:
    q, calls = torch.randn(1, Q_HEADS, 1, head_dim), []
    for _ in range(64):
        keys_values = torch.randn(2, 1, KV_HEADS, length, head_dim)
        calls.append(GgmlAttention(library, cache, q, keys_values, token_major=token_major))
        if len(calls) >= _copies(calls[0].cache_bytes):
            break
    return rotate(calls), calls[0].cache_bytes


def _prompt(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A prompt of 2048 tokens: float attention, the same and its quantization, and a second half over a cache
    of the first."""
    rows, length = [], 2048
    half = length // 2
    mask = torch.ones(half, length, dtype=torch.bool).tril(half)
    dtypes, head_dims = (torch.float32, torch.bfloat16, torch.float16), (64,) if args.quick else (64, 128)
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        q = torch.randn(1, Q_HEADS, length, head_dim).to(dtype)
        k, v = torch.randn(2, 1, KV_HEADS, length, head_dim).to(dtype)

        def whole(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            lowbit.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def first(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            lowbit.QuantizedKVCache("int8").append(0, k, v)
            lowbit.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def second(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            lowbit.scaled_dot_product_attention(q[:, :, half:], k, v, mask, enable_gqa=True)

        calls: dict[str, Callable[[], object]] = {
            "float": whole,
            "and an int8 cache filled": first,
            "float, second half": second,
        }
        for name in ("int8", "int4"):
            filled = lowbit.QuantizedKVCache(name)
            filled.append(0, k, v)
            calls[f"second half over an {name} cache"] = lambda q=q, cache=filled: cache.attend(0, q[:, :, half:])
        times = interleave(calls, rounds=args.rounds, sample_s=0.05)
        cells = []
        for name in calls:
            ratio = times[name].best_s / times["float, second half" if "second" in name else "float"].best_s
            rows.append(
                {
                    "candidate": f"prompt: {name}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "head_dim": head_dim,
                    "kv_length": length,
                    "best_s": times[name].best_s,
                    "ratio": ratio,
                }
            )
            cells.append([name, duration(times[name].best_s), f"{ratio:.2f}x"])
        title = f"prompt {rows[-1]['dtype']} D={head_dim} L={length}, {args.threads} threads"
        print(f"\n{table([title, 'time', 'x float (<= 1.1)'], cells)}")
    return rows
