# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps: lowbit, torch and the peers on the same parameters in the same interleaved rounds.

    python benchmarks/bench_optim.py --quick                      # 16 M parameters, under 2 minutes
    python benchmarks/bench_optim.py --out benchmarks/results/optim.json
    python benchmarks/bench_optim.py --device cuda --parameters 512   # and what a copy reaches there
    LOWBIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/bench_optim.py   # as an AVX2 machine

Three problems: one large float32 parameter list, the same in bfloat16, and 1000 tensors of 64x64. Ratios are against
torch's fused AdamW in the same run (above 1: faster). A step's bytes are what must cross the memory bus at least:
parameter, gradient and states read, parameter and states written. The first step of a fresh optimizer allocates its
states: that of ours is compared with the one after.
bitsandbytes and torchao take part when they can be imported (torchao compiles for each shape: seconds,
before the rounds).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import MIB, Run, Timing, duration, interleave, table
from torch import nn
from torch.optim import Optimizer

import lowbit
from lowbit import _C

Result = dict[str, Any]
BASELINE = "torch fused"
# Issue 4, with 2 threads: {problem: {candidate: speed relative to torch's fused AdamW on the same parameters}}.
TARGETS: dict[str, dict[str, float]] = {
    "float32": {"AdamW8bit": 1.0, "AdamW4bit": 0.9},
    "bfloat16": {"AdamW8bit": 1.3},
    "small": {"AdamW8bit": 0.5},
}
PEER_TARGET = 20  # AdamW8bit against bitsandbytes and torchao


@dataclass(frozen=True, slots=True)
class Candidate:
    """An optimizer: how to make it from parameters, and the bits a parameter's states take (two moments)."""

    name: str
    make: Callable[[list[nn.Parameter]], Optimizer]
    state_bits: float | None = None  # None: as the parameter
    ours: bool = False
    problems: tuple[str, ...] = ("float32", "bfloat16", "small")

    def bytes_of_step(self, parameters: list[nn.Parameter]) -> float:
        """Bytes of one step: read p, g and states, write p and states."""
        total = 0.0
        for p in parameters:
            states = p.numel() * (2 * p.element_size() if self.state_bits is None else self.state_bits / 8)
            total += 3 * p.numel() * p.element_size() + 2 * states
        return total


def candidates(only: str | None, peers: bool) -> list[Candidate]:
    optim = lowbit.optim
    coded = 2 * (8 + 32 / 256), 2 * (4 + 32 / 128)  # codes and a float32 scale per block, two moments
    everyone = [
        Candidate(BASELINE, lambda p: torch.optim.AdamW(p, fused=True)),
        Candidate("torch foreach", lambda p: torch.optim.AdamW(p, foreach=True)),
        Candidate("AdamW", lambda p: optim.AdamW(p), 64, True),
        Candidate("AdamW bf16 states", lambda p: optim.AdamW(p, state_dtype=torch.bfloat16), 32, True),
        Candidate("AdamW8bit", lambda p: optim.AdamW8bit(p), coded[0], True),
        Candidate(
            "AdamW8bit stochastic",
            lambda p: optim.AdamW8bit(p, bf16_stochastic_round=True),
            coded[0],
            True,
            ("bfloat16",),
        ),
        Candidate(
            "AdamW8bit bf16+8",
            lambda p: optim.AdamW8bit(p, master="bf16+8"),
            coded[0] + 8,
            True,
            ("bfloat16",),
        ),
        Candidate("AdamW4bit", lambda p: optim.AdamW4bit(p), coded[1], True),
        Candidate("AdamWFp8", lambda p: optim.AdamWFp8(p), coded[0], True),
        Candidate("SGD8bit", lambda p: optim.SGD8bit(p, lr=1e-3, momentum=0.9), coded[0] / 2, True),
        Candidate("Lion8bit", lambda p: optim.Lion8bit(p), coded[0] / 2, True),
    ]
    if peers:
        everyone += [
            Candidate("bitsandbytes AdamW8bit", _bitsandbytes, coded[0]),
            Candidate("torchao AdamW8bit", _torchao, coded[0]),
        ]
    words = only.lower().split(",") if only else [""]
    return [item for item in everyone if item.name == BASELINE or any(word in item.name.lower() for word in words)]


def _bitsandbytes(parameters: list[nn.Parameter]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters)


def _torchao(parameters: list[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters)


def problem(name: str, parameters: int, device: str) -> list[nn.Parameter]:
    """Parameters with gradients: layers of 4 M elements, or 1000 of 64x64."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    side = 64 if name == "small" else 2048
    result = []
    for _ in range(1000 if name == "small" else max(1, parameters // side**2)):
        p = nn.Parameter((torch.randn(side, side, generator=generator) * 0.02).to(device, dtype))
        p.grad = (torch.randn(side, side, generator=generator) * 1e-3).to(device, dtype)
        result.append(p)
    return result


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    run = Run()
    results: list[Result] = []
    for name in args.problems:
        results += bench(args, name)
    run.end(args.out, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, help="millions, of the large problems (default 64)")
    parser.add_argument("--problems", default="float32,bfloat16,small")
    parser.add_argument("--device", default="cpu", help="cuda: torch's and the peers' kernels there too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--only", help="parts of candidate names, e.g. adamw8bit,bitsandbytes; torch's fused always runs"
    )
    parser.add_argument("--no-peers", action="store_true", help="without bitsandbytes and torchao")
    parser.add_argument("--rounds", type=int, help="samples of each candidate (default 12)")
    parser.add_argument("--quick", action="store_true", help="16 M parameters, 4 rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.parameters = int((args.parameters or (16 if args.quick else 64)) * 2**20)
    args.rounds = args.rounds or (4 if args.quick else 12)
    args.problems = args.problems.split(",")
    return args


def bench(args: argparse.Namespace, name: str) -> list[Result]:
    parameters = problem(name, args.parameters, args.device)
    finish = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    entrants: dict[str, tuple[Candidate, Optimizer]] = {}
    first: dict[str, tuple[float, float]] = {}
    for candidate in candidates(args.only, not args.no_peers):
        if name not in candidate.problems:
            continue
        try:
            optimizer = candidate.make(parameters)
            first[candidate.name] = _seconds(optimizer.step, finish), _seconds(optimizer.step, finish)
            entrants[candidate.name] = candidate, optimizer
        except Exception as error:  # a peer that is not installed or cannot run here
            if candidate.ours:
                raise
            print(
                f"left out: {candidate.name}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )
    calls: dict[str, Callable[[], object]] = {key: optimizer.step for key, (_, optimizer) in entrants.items()}
    if args.device != "cpu":
        copied = torch.empty(2**28, dtype=torch.uint8, device=args.device)
        to = torch.empty_like(copied)
        calls["copy"] = lambda: to.copy_(copied)
    times = interleave(calls, rounds=args.rounds, finish=finish)
    if "copy" in times:
        print(f"\na copy of 256 MiB in the same rounds: {2 * 2**28 / times['copy'].best_s / 1e9:.0f} GB/s")
    count = sum(p.numel() for p in parameters)
    rows = [_result(name, args.threads, count, parameters, *entrants[key], times, first[key]) for key in entrants]
    report(name, args.threads, count, parameters, rows)
    return rows


def _seconds(call: Callable[[], object], finish: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def _result(
    name: str,
    threads: int,
    count: int,
    parameters: list[nn.Parameter],
    candidate: Candidate,
    optimizer: Optimizer,
    times: dict[str, Timing],
    first: tuple[float, float],
) -> Result:
    timing = times[candidate.name]
    kernel = ""
    if candidate.ours:
        optimizer.step()
        kernel = _C.last_kernel("optim_step")
    return {
        "candidate": candidate.name,
        "problem": name,
        "threads": threads,
        "parameters": count,
        "tensors": len(parameters),
        "best_s": timing.best_s,
        "median_s": timing.median_s,
        "worst_s": timing.worst_s,
        "samples": timing.samples,
        "first_s": first[0],
        "second_s": first[1],
        "state_bytes_per_parameter": _state_bytes(optimizer) / count,
        "gb_per_s": candidate.bytes_of_step(parameters) / timing.best_s / 1e9,
        "ratio": times[BASELINE].best_s / timing.best_s,
        "kernel": kernel,
    }


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in the state, counted once: the parts of torchao's subclass, bitsandbytes' shared maps."""
    storages: dict[int, int] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "__tensor_flatten__"):
                for part in value.__tensor_flatten__()[0]:
                    add(getattr(value, part))
            else:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)

    for state in optimizer.state.values():
        add(state)
    return sum(storages.values())


def report(name: str, threads: int, count: int, parameters: list[nn.Parameter], rows: list[Result]) -> None:
    size = f"{len(parameters)} x {list(parameters[0].shape)} {str(parameters[0].dtype).removeprefix('torch.')}"
    title = f"{count / 2**20:.0f} M parameters, {size}, {threads} thread{'s' if threads > 1 else ''}"
    cells = [
        [
            row["candidate"],
            duration(row["best_s"]),
            _verdict(row["ratio"], TARGETS.get(name, {}).get(row["candidate"])),
            f"{row['gb_per_s']:.1f}",
            f"{row['state_bytes_per_parameter']:.2f}",
            f"{duration(row['first_s'])}, {duration(row['second_s'])}",
        ]
        for row in rows
    ]
    columns = [
        title,
        "step",
        f"x {BASELINE} (target of issue 4)",
        "GB/s",
        "state bytes per parameter",
        "first, second step",
    ]
    print(f"\n{table(columns, cells)}")
    by_name = {row["candidate"]: row["best_s"] for row in rows}
    for peer in ("bitsandbytes AdamW8bit", "torchao AdamW8bit"):
        if peer in by_name and "AdamW8bit" in by_name:
            ratio = by_name[peer] / by_name["AdamW8bit"]
            print(f"AdamW8bit against {peer}: {_verdict(ratio, PEER_TARGET if name == 'float32' else None)}")
    print(f"memory used by one process: {_resident() / MIB:.0f} MiB")


def _verdict(ratio: float, target: float | None) -> str:
    return f"{ratio:.2f}x" if target is None else f"{ratio:.2f}x ({target:g} {'hit' if ratio >= target else 'MISS'})"


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
