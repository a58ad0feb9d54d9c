# SPDX-License-Identifier: Apache-2.0
"""A step of decoding on an NVIDIA GPU: one query a sequence over a key-value cache as int8, int4 or bfloat16, beside
torch's SDPA over bfloat16 and a copy in memory, in the same interleaved rounds.

    python benchmarks/bench_decode_cuda.py --out benchmarks/results/decode_cuda.json

Every call but the copy is a replay of a CUDA graph, over caches that are more than the L2 cache together. `of a copy`
is the bytes of the cache a second as a share of what a copy reads and writes. Ratios are against torch in the same
run. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import describe, duration, header, interleave, save, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import lowbit

COPIED = 1 << 29  # bytes
TOGETHER = 1 << 28  # of the caches that a replay goes through


def main() -> None:
    args = parse_arguments()
    head = header() | {"gpu": torch.cuda.get_device_name()}
    print(describe(head), head["gpu"])
    results = [row for shape in args.shapes for row in measure(args, shape)]
    if args.out:
        save(args.out, head, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default="1x32x8x8192x128,8x32x8x4096x128,16x64x8x16384x128", help="BxHqxHkvxSxE,..."
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes.split(",")]
    return args


def replay(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    with torch.no_grad():
        calls[0]()  # what is compiled or loaded at first use cannot be in a graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return graph.replay


def step(format: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], int]:
    """A call, and the bytes of its cache."""
    if format == "torch bfloat16":
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]), k.nbytes + v.nbytes
    if format == "bfloat16":
        options = (q.shape[-1] ** -0.5, None, None, False, True, k.shape[2] - 1, 0, v.shape[-1])
        return lambda: torch.ops.lowbit.decode(q, k, v, *options), k.nbytes + v.nbytes
    cache = lowbit.QuantizedKVCache(format)
    cache.append(0, k, v)
    layer = cache.layers[0]
    return lambda: layer.attend(q), layer.nbytes


def measure(args: argparse.Namespace, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    b, hq, hkv, length, e = shape
    count = max(1, TOGETHER // (b * hkv * length * e * 2 * 2))
    tensors = [
        [torch.randn(b, heads, tokens, e, device="cuda", dtype=torch.bfloat16) for heads, tokens in
         ((hq, 1), (hkv, length), (hkv, length))] for _ in range(count)
    ]  # fmt: skip
    source, target = (torch.zeros(COPIED, device="cuda", dtype=torch.uint8) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}  # of a graph it takes 1.5 of the time
    sizes = {"copy": 2 * COPIED}
    # All caches stay: a capture gives memory that is free back to the driver, also what an earlier graph reads.
    formats = ("torch bfloat16", "bfloat16", "int8", "int4")
    steps = {format: [step(format, *each) for each in tensors] for format in formats}
    for format, of in steps.items():
        calls[format], sizes[format] = replay([call for call, _ in of]), sum(size for _, size in of)
    times = interleave(calls, rounds=args.rounds, finish=torch.cuda.synchronize)
    speed = {name: sizes[name] / time.best_s for name, time in times.items()}
    peer = times["torch bfloat16"].best_s
    rows = [
        {"candidate": name, "shape": shape, "best_s": time.best_s / (1 if name == "copy" else count),
         "of_copy": speed[name] / speed["copy"], "ratio": peer / time.best_s} for name, time in times.items()
        if name != "copy"
    ]  # fmt: skip
    text = [
        [row["candidate"], duration(row["best_s"]), f"{row['of_copy']:.0%}", f"{row['ratio']:.2f}x"] for row in rows
    ]
    print(
        "\n"
        + "x".join(str(size) for size in shape)
        + f", copy {speed['copy'] / 1e9:.0f} GB/s\n"
        + table(["", "time", "of a copy", "against torch"], text)
    )
    return rows


if __name__ == "__main__":
    main()
