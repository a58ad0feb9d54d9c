# SPDX-License-Identifier: Apache-2.0
"""Time of packing a weight: plain rounding (absmax) and scales by search, on each instruction set of this machine.

    python benchmarks/bench_quantize.py
    python benchmarks/bench_quantize.py --n 1024 --threads 1

With one thread the time is that thread's own, so that a busy machine spoils little.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
from harness import describe, duration, header, table

import lowbit
from lowbit import _C, testing

CASES = {  # format, group size, mapping
    "int4 g32": ("int4", 32, "symmetric"),
    "int4 g128": ("int4", 128, "symmetric"),
    "int4 per channel": ("int4", 0, "symmetric"),
    "int4 g32 asymmetric": ("int4", 32, "asymmetric"),
    "int8 per channel": ("int8", 0, "symmetric"),
}
CHOICES = {"absmax": (0, False), "search": (1, False), "search, importance": (1, True)}


def pack(weight: torch.Tensor, packed: torch.Tensor, row: str, args: tuple, importance: torch.Tensor | None) -> None:
    with lowbit.force_kernel(row):
        _C.quantize(weight, packed, *args, importance)


def best_of(calls: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of the best of interleaved rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first also warms up
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe(header()))
    weight = torch.randn(args.n, args.k).to(getattr(torch, args.dtype))
    isas = [row["backend"] for row in testing.rows("quantize") if row["available"] and row["backend"] != "scalar"]
    importance, lines = torch.rand(args.k), []
    for name, (format, group_size, mapping) in CASES.items():
        asymmetric = mapping == "asymmetric"
        packed = testing.empty_packed(args.n, args.k, format, group_size, asymmetric)
        calls: dict[str, Callable[[], None]] = {}
        for isa in isas:
            for choice, (number, weighted) in CHOICES.items():
                numbers = (_C.FORMATS[format], group_size, asymmetric, _C.MAPPINGS[mapping], number)
                row = f"quantize_panels_{isa}"
                call = functools.partial(pack, weight, packed, row, numbers, importance if weighted else None)
                calls[f"{isa}, {choice}"] = call
        times = best_of(calls, args.rounds, time.thread_time if args.threads == 1 else time.perf_counter)
        for isa in isas:
            plain = times[f"{isa}, absmax"]
            for choice in CHOICES:
                best = times[f"{isa}, {choice}"]
                speed = f"{args.n * args.k * 4 / best / 1e9:.2f}"
                lines.append([f"{name}, {isa}, {choice}", duration(best), speed, f"{best / plain:.2f}"])
    print(f"{args.n} x {args.k} {args.dtype}, {args.threads} threads, best of {args.rounds} interleaved rounds")
    print(table(["", "time", "GB/s of float32", "of absmax"], lines))


if __name__ == "__main__":
    main()
