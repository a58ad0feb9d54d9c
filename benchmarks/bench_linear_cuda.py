# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers on an NVIDIA GPU: lowbit, torch and the peers in the same interleaved rounds.

    python benchmarks/bench_linear_cuda.py --out benchmarks/results/linear_cuda.json
    python benchmarks/bench_linear_cuda.py --device cpu --shapes 256x256 --m 1,16   # that it runs, on a machine without

A sample is one replay of a CUDA graph of as many calls as there are copies of the weight, which exceed --cold-mib
together: no weight is left in L2, and what Python takes is not measured (--eager measures it). Ratios are against torch
bfloat16 in the same run. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import linear_candidates as members
import torch
from harness import MIB, describe, duration, header, interleave, save, table

import lowbit
from lowbit import _C

BASELINE = "torch bf16"
OURS = ("int4 weight-only g128", "int8 weight-only", "nf4 weight-only g64", "fp8 weight-only", "W8A8", "W4A8 g32")
Calls = list[Callable[[], Any]]


def main() -> None:
    args = parse_arguments()
    head = header() | {"gpu": torch.cuda.get_device_name() if args.device == "cuda" else "none"}
    print(describe(head), head["gpu"])
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        copied = copy_bandwidth(args)
        print(f"copy: {copied:.0f} GB/s read and written")
        for n, k in args.shapes:
            results += bench_shape(args, n, k, copied)
    if args.out:
        save(args.out, head | {"copy_gb_per_s": copied}, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", default="8192x8192,4096x14336", help="NxK,...")
    parser.add_argument("--m", default="1,4,8,16,64,256,1024", help="rows of the activations")
    parser.add_argument("--only", help="parts of candidates' names")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cold-mib", type=int, default=256, help="size of all copies of a weight together")
    parser.add_argument("--eager", action="store_true", help="calls from Python instead of a graph of them")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes.split(",")]
    args.m = [int(m) for m in args.m.split(",")]
    return args


def torch_int4pack(weight: torch.Tensor) -> tuple[members.Layer, int]:
    """tinygemm's weights: torch._weight_int4pack_mm, groups of 128."""
    group, (n, k) = 128, weight.shape
    scale = weight.reshape(n, k // group, group).abs().amax(2) / 7
    codes = ((weight.reshape(n, k // group, group) / scale[:, :, None]).round().clamp(-8, 7) + 8).reshape(n, k).int()
    packed = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    scales = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch._weight_int4pack_mm(x, packed, group, scales), n * k // 2


def candidates(args: argparse.Namespace) -> dict[str, Callable[[torch.Tensor], tuple[members.Layer, int]]]:
    everyone = {item.name: item.make for item in members.candidates(None, True, ())}
    chosen = {BASELINE: everyone[BASELINE]} | {name: everyone[name] for name in OURS}
    if args.device == "cuda":
        chosen |= {"torch int4pack g128": torch_int4pack, "bitsandbytes nf4": bitsandbytes_nf4}
    parts = [part.strip().lower() for part in (args.only or "").split(",")]
    return {name: make for name, make in chosen.items() if name == BASELINE or any(p in name.lower() for p in parts)}


def bitsandbytes_nf4(weight: torch.Tensor) -> tuple[members.Layer, int]:
    from bitsandbytes import nn as bnb

    n, k = weight.shape
    layer = bnb.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.load_state_dict({"weight": weight.cpu()})
    return layer.to(weight.device), n * k // 2


def bench_shape(args: argparse.Namespace, n: int, k: int, copied: float) -> list[dict[str, Any]]:
    weight = torch.randn(n, k, device=args.device) * 0.02
    layers, sizes, rows = {}, {}, []
    for name, make in candidates(args).items():
        try:
            layer, sizes[name] = make(weight)
            copies = math.ceil(args.cold_mib * MIB / sizes[name]) if args.device == "cuda" else 1
            layers[name] = [layer] + [make(weight)[0] for _ in range(copies - 1)]
            layer(torch.randn(1, k, device=args.device, dtype=torch.bfloat16))
        except Exception as error:  # a peer that is not here, or cannot
            if name == BASELINE or name in OURS:
                raise
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            layers.pop(name, None)
    for m in args.m:
        x = torch.randn(m, k, device=args.device, dtype=torch.bfloat16)
        samples = {name: sample(args, [lambda layer=layer: layer(x) for layer in of]) for name, of in layers.items()}
        finish = torch.cuda.synchronize if args.device == "cuda" else lambda: None
        times = interleave(samples, rounds=args.rounds, finish=finish)
        for name, time in times.items():
            seconds = time.best_s / len(layers[name])
            speed, row = sizes[name] / seconds / 1e9, row_of(layers[name][0], x)
            rows.append({"candidate": name, "n": n, "k": k, "m": m, "best_s": seconds, "row": row,
                         "gb_per_s": speed, "share_of_copy": speed / copied,
                         "ratio": times[BASELINE].best_s / len(layers[BASELINE]) / seconds})  # fmt: skip
    report(rows, args.m, n, k)
    return rows


def sample(args: argparse.Namespace, calls: Calls) -> Callable[[], Any]:
    """All calls once, as one graph where that is wanted."""

    def run() -> None:
        for call in calls:
            call()

    if args.device == "cpu" or args.eager:
        return run
    run()  # what is compiled or loaded at first use cannot be in a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def row_of(layer: members.Layer, x: torch.Tensor) -> str:
    if not isinstance(layer, lowbit.QuantLinear):
        return ""
    layer(x)
    return _C.last_kernel("linear")


def copy_bandwidth(args: argparse.Namespace) -> float:
    """GB/s of torch's copy: what is read and what is written."""
    source = torch.empty((1 << 30) if args.device == "cuda" else (1 << 26), dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    finish = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    times = interleave({"copy": lambda: target.copy_(source)}, rounds=args.rounds, finish=finish)
    return 2 * source.nbytes / times["copy"].best_s / 1e9


def report(rows: list[dict[str, Any]], ms: list[int], n: int, k: int) -> None:
    cells = {(row["candidate"], row["m"]): row for row in rows}
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    text = [[name, *(f"{duration(cells[name, m]['best_s'])} {cells[name, m]['ratio']:.2f}x" for m in ms),
             f"{100 * cells[name, ms[0]]['share_of_copy']:.0f} %"] for name in names]  # fmt: skip
    print("\n" + table([f"N={n} K={k}", *(f"M={m}" for m in ms), f"of copy, M={ms[0]}"], text))


if __name__ == "__main__":
    main()
