# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers: lowbit, torch and the peers in the same interleaved rounds.

    python benchmarks/bench_linear.py --quick                      # under 2 minutes
    python benchmarks/bench_linear.py --out benchmarks/results/linear.json
    LOWBIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/bench_linear.py   # as an
    AVX2 machine

Peers beyond torch take part when they can be imported: pip install "torch==2.13.0" torchao bitsandbytes; llama.cpp and
ik_llama.cpp when they are built: --ggml ik_llama.cpp=/path/libggml.so (docs/measured/linear.md says how); zentorch by
the folder of its wheel: --zentorch FOLDER.
M <= --cold-m rotates over copies of each weight that exceed --cold-mib together, as decoding a model does; larger M
repeats one weight. Ratios are against torch fp32 in the same run at the same number of threads. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import cpu_peers
import linear_candidates as members
import torch
from ggml_linear import Library
from harness import MIB, Run, Timing, duration, interleave, rotate, table

import lowbit
from lowbit import _C

Result = dict[str, Any]
# Issue 3, against torch fp32 on an AVX2 machine: {threads: {candidate: {m: ratio}}}.
TARGETS: dict[int, dict[str, dict[int, float]]] = {
    2: {
        "int8 weight-only": {1: 5.5, 4: 6, 32: 2, 256: 1.0, 512: 1.0},
        "int4 weight-only g128": {1: 7, 4: 6, 32: 2, 256: 1.0, 512: 1.0},
        "W4A8 g32": {1: 9, 4: 14, 32: 3.5, 256: 2.5, 512: 2.5},
        "W8A8": {1: 5.5, 4: 8, 32: 3, 256: 1.6, 512: 1.6},
        "dense bf16": {1: 3, 4: 5, 32: 1.5, 256: 1.0, 512: 1.0},
        "dense f16": {1: 3, 4: 5, 32: 1.5, 256: 1.0, 512: 1.0},
    },
    1: {"W4A8 g32": {1: 5.5, 4: 8, 32: 2.5, 256: 2.5, 512: 2.5}},
}
CALL_TARGET = 1.2  # a 64x64 QuantLinear against nn.Linear
BANDWIDTH_TARGET = 0.8


def main() -> None:
    args = parse_arguments()
    args.libraries = [Library(name, Path(path)) for name, _, path in (given.partition("=") for given in args.ggml)]
    run = Run()
    results: list[Result] = []
    with torch.inference_mode():
        for k, n in args.shapes:
            results += bench_shape(args, n, k)
        overhead = [] if args.no_overhead else bench_overhead(args)
    run.end(args.out, results, call_overhead=overhead)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="KxN,... (default 4096x4096,4096x14336)")
    parser.add_argument("--m", help="rows of the activations (default 1,4,32,128,512)")
    parser.add_argument("--threads", help="(default 1,2)")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the activations"
    )
    parser.add_argument("--only", help="parts of candidate names, e.g. w4a8,w8a8,bitsandbytes; torch fp32 always runs")
    parser.add_argument("--ggml", action="append", default=[], help="NAME=PATH of libggml.so; names: ggml_linear.TYPES")
    parser.add_argument("--zentorch", help="folder of its wheel (cpu_peers.py)")
    parser.add_argument("--no-peers", action="store_true", help="only torch fp32 beside ours")
    parser.add_argument("--no-overhead", action="store_true", help="leave out the 64x64 call")
    parser.add_argument("--rounds", type=int, help="samples of each candidate (default 12)")
    parser.add_argument("--sample-ms", type=float, default=20.0)
    parser.add_argument("--cold-m", type=int, default=4, help="largest M that rotates over copies of the weight")
    parser.add_argument("--cold-mib", type=int, default=224, help="size of all copies together")
    parser.add_argument("--quick", action="store_true", help="4096x4096, M 1,4,32,512, all threads, 3 rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    shapes = args.shapes or ("4096x4096" if args.quick else "4096x4096,4096x14336")
    args.shapes = [tuple(int(size) for size in shape.split("x")) for shape in shapes.split(",")]
    args.m = [int(m) for m in (args.m or ("1,4,32,512" if args.quick else "1,4,32,128,512")).split(",")]
    cpus = torch.get_num_threads()
    args.threads = [int(t) for t in (args.threads or (str(cpus) if args.quick else "1,2")).split(",")]
    args.rounds = args.rounds or (3 if args.quick else 12)
    args.sample_s = args.sample_ms / 1000 * (0.5 if args.quick else 1)
    args.dtype = getattr(torch, args.dtype)
    return args


class Entrant:
    """A candidate with its layers: one for large M, enough copies to be cold for small M."""

    def __init__(self, candidate: members.Candidate, weight: torch.Tensor, cold_bytes: int) -> None:
        self.candidate = candidate
        built = members.build(candidate, weight)
        self.problem = built if isinstance(built, str) else ""
        if self.problem:
            return
        layer, self.bytes = built
        self.layers = [layer]
        while len(self.layers) < math.ceil(cold_bytes / self.bytes):
            another = members.copy_layer(layer) if candidate.copies else None
            if another is None:
                break
            self.layers.append(another)

    def call(self, x: torch.Tensor, cold: bool) -> Any:
        x = x.to(self.candidate.dtype or x.dtype)
        return rotate([lambda layer=layer: layer(x) for layer in (self.layers if cold else self.layers[:1])])


def bench_shape(args: argparse.Namespace, n: int, k: int) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator) * 0.02
    inputs = {m: torch.randn(m, k, generator=generator).to(args.dtype) for m in args.m}
    cold_bytes = args.cold_mib * MIB if min(args.m) <= args.cold_m else 0
    entering = members.candidates(args.only, not args.no_peers, args.libraries, cpu_peers.zentorch(args.zentorch))
    everyone = [Entrant(item, weight, cold_bytes) for item in entering]
    check = inputs[min(args.m)]
    exact = check.double() @ weight.double().T
    entrants, errors = [], {}
    for entrant in everyone:
        name = entrant.candidate.name
        try:
            if not entrant.problem:
                errors[name] = _error(entrant.call(check, False)(), exact)
                entrants.append(entrant)
        except Exception as error:  # a peer that cannot run on this machine
            if entrant.candidate.ours:
                raise
            entrant.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if entrant.problem:
            print(f"left out: {name}: {entrant.problem}")
    results: list[Result] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows: list[Result] = []
        bandwidth = read_bandwidth(threads)
        for m in args.m:
            cold = m <= args.cold_m
            times = interleave(
                {entrant.candidate.name: entrant.call(inputs[m], cold) for entrant in entrants},
                rounds=args.rounds,
                sample_s=args.sample_s,
            )
            rows += [_result(entrant, times, errors, m, cold, args.dtype, inputs[m]) for entrant in entrants]
        bandwidth = _larger(bandwidth, read_bandwidth(threads))
        for row in rows:
            row |= {"k": k, "n": n, "threads": threads, "read_gb_per_s": bandwidth}
        report(rows, args.m, k, n, threads, bandwidth)
        results += rows
    return results


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def _result(
    entrant: Entrant,
    times: dict[str, Timing],
    errors: dict[str, float],
    m: int,
    cold: bool,
    dtype: torch.dtype,
    x: torch.Tensor,
) -> Result:
    name = entrant.candidate.name
    time = times[name]
    kernel = ""
    if entrant.candidate.ours:
        entrant.call(x, False)()
        kernel = _C.last_kernel("linear")
    return {
        "candidate": name,
        "m": m,
        "dtype": str(entrant.candidate.dtype or dtype).removeprefix("torch."),
        "cold": cold,
        "copies": len(entrant.layers) if cold else 1,
        "best_s": time.best_s,
        "median_s": time.median_s,
        "worst_s": time.worst_s,
        "samples": time.samples,
        "weight_bytes": entrant.bytes,
        "weight_gb_per_s": entrant.bytes / time.best_s / 1e9,
        "ratio": times[members.BASELINE].best_s / time.best_s,
        "relative_error": errors[name],
        "kernel": kernel,
    }


def read_bandwidth(threads: int) -> float | None:
    """GB/s of reading memory with 4 prefetched streams a thread; None in a build that cannot measure it."""
    measure = getattr(_C, "read_bandwidth", None)
    return max(measure(512 * MIB, 4, threads) for _ in range(3)) if measure else None


def _larger(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else max(a, b)


def report(rows: list[Result], ms: list[int], k: int, n: int, threads: int, bandwidth: float | None) -> None:
    by_name: dict[str, dict[int, Result]] = {}
    for row in rows:
        by_name.setdefault(row["candidate"], {})[row["m"]] = row
    baseline = by_name.pop(members.BASELINE)
    title = f"K={k} N={n}, {threads} thread{'s' if threads > 1 else ''}"
    times = [[members.BASELINE, *(duration(baseline[m]["best_s"]) for m in ms), ""]]
    times += [
        [name, *(duration(cells[m]["best_s"]) for m in ms), f"{cells[ms[0]]['relative_error']:.1e}"]
        for name, cells in by_name.items()
    ]
    headings = [f"M={m}{' cold' if baseline[m]['cold'] else ''}" for m in ms]
    print(f"\n{table([title, *headings, 'error'], times)}")
    peers = [name for name in by_name if name not in members.OURS]
    ratios = [
        [name, *(_verdict(cells[m], TARGETS.get(threads, {}).get(name, {}).get(m)) for m in ms)]
        for name, cells in by_name.items()
    ]
    print(f"\n{table(['x torch fp32 (target of issue 3, hit or MISS)', *headings], ratios)}")
    for m in ms:
        fastest = min((by_name[name][m] for name in peers), key=lambda row: row["best_s"], default=baseline[m])
        fastest = min(fastest, baseline[m], key=lambda row: row["best_s"])
        slower = [name for name in by_name if name in members.OURS and by_name[name][m]["best_s"] > fastest["best_s"]]
        print(
            f"M={m}: fastest peer {fastest['candidate']}, {duration(fastest['best_s'])}; slower than it: "
            f"{', '.join(slower) or 'none'}"
        )
    if 1 in ms:
        limit = (
            f"{bandwidth:.1f} GB/s read with 4 streams a thread" if bandwidth else "read bandwidth n/a in this build"
        )
        speeds = (f"{name} {_share(cells[1], bandwidth)}" for name, cells in by_name.items() if name in members.OURS)
        print(f"M=1 packed weight, against {limit}: {'; '.join(speeds)}")


def _verdict(row: Result, target: float | None) -> str:
    if target is None:
        return f"{row['ratio']:.2f}x"
    return f"{row['ratio']:.2f}x ({target:g} {'hit' if row['ratio'] >= target else 'MISS'})"


def _share(row: Result, bandwidth: float | None) -> str:
    text = f"{row['weight_gb_per_s']:.1f} GB/s"
    if not bandwidth:
        return text
    share = row["weight_gb_per_s"] / bandwidth
    return f"{text} = {100 * share:.0f} % {'hit' if share >= BANDWIDTH_TARGET else 'MISS'}"


def bench_overhead(args: argparse.Namespace) -> list[Result]:
    """Time a 64x64 layer at M=1: the cost of a call beside its arithmetic."""
    results: list[Result] = []
    x = torch.randn(1, 64).to(args.dtype)
    for threads in args.threads:
        torch.set_num_threads(threads)
        plain = torch.nn.Linear(64, 64).to(args.dtype)
        layers = {"nn.Linear": plain}
        for name, config in members.OURS.items():
            layer = torch.nn.Sequential(members.copy_layer(plain))
            lowbit.quantize_(layer, config)
            layers[name] = layer[0]
        calls = {name: lambda layer=layer: layer(x) for name, layer in layers.items()}
        times = interleave(calls, rounds=args.rounds, sample_s=args.sample_s / 2)
        base = times["nn.Linear"].best_s
        for name, time in times.items():
            results.append({"candidate": name, "threads": threads, "best_s": time.best_s, "ratio": time.best_s / base})
        rows = [
            [
                name,
                duration(time.best_s),
                f"{time.best_s / base:.2f}x {'hit' if time.best_s <= CALL_TARGET * base else 'MISS'}",
            ]
            for name, time in times.items()
        ]
        print(
            "\n"
            + table([f"a call of 64x64, M=1, {threads} threads", "time", f"x nn.Linear (<= {CALL_TARGET:g})"], rows)
        )
    return results


if __name__ == "__main__":
    main()
