# SPDX-License-Identifier: Apache-2.0
"""Time calls against each other, describe the machine, and write both down.

A round takes one sample of every candidate, so a drift of the machine (shared memory bandwidth, frequency) meets
all alike; the best sample of each counts, the median and the spread are kept beside it. A sample is as many calls
as fill `sample_s`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]
MIB = 1 << 20
FLAGS = (
    "avx2 fma f16c avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx512_vbmi amx_tile amx_int8 "
    "amx_bf16"
).split()
ENVIRONMENT = (
    "LOWBIT_ISA LOWBIT_KERNEL ATEN_CPU_CAPABILITY MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA OMP_NUM_THREADS "
    "MKL_NUM_THREADS"
).split()
MEASURED = (":/csrc", ":/python", ":/benchmarks")
PACKAGES = ("torch", "lowbit", "torchao", "bitsandbytes", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the best, the median and the worst sample, and how many there were."""

    best_s: float
    median_s: float
    worst_s: float
    samples: int


def options(parser: argparse.ArgumentParser, *, rounds: int, threads: int | None = None) -> argparse.Namespace:
    """The command line by ``parser``, which gets --threads, --rounds and --out; torch gets its threads and a seed."""
    parser.add_argument("--threads", type=int, default=threads or torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=rounds, help="samples of each candidate")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    return given


def forward_and_backward(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Call:
    """A step of training without its optimizer: gradients of x and of the parameters, made anew in each."""
    inputs = x.clone().requires_grad_()

    def step() -> None:
        inputs.grad = None
        module.zero_grad()
        module(inputs).backward(grad)

    return step


def rotate(calls: Sequence[Call]) -> Call:
    """Return a call that runs the next of ``calls`` each time: with enough copies of a weight none is left
    in a cache."""
    if len(calls) == 1:
        return calls[0]
    state = {"next": 0}

    def run() -> object:
        index = state["next"]
        state["next"] = index + 1 if index + 1 < len(calls) else 0
        return calls[index]()

    return run


def interleave(
    candidates: dict[str, Call],
    *,
    rounds: int,
    sample_s: float = 0.02,
    warmup: int = 2,
    slow_s: float = 0.5,
    finish: Call = lambda: None,
) -> dict[str, Timing]:
    """Time all candidates in interleaved rounds.

    Args:
        candidates: calls by name.
        rounds: samples of each. One whose call takes over ``slow_s`` gets two.
        sample_s: aimed length of a sample.
        warmup: calls before the first sample (one for a slow candidate).
        finish: ends a sample: waits for a device that works on after a call has returned.
    """
    repeats: dict[str, int] = {}
    quota: dict[str, int] = {}
    for name, call in candidates.items():
        first = _sample(call, 1, finish)
        quota[name] = min(rounds, 2) if first > slow_s else rounds
        again = first if first > slow_s else min(_sample(call, 1, finish) for _ in range(warmup))
        repeats[name] = max(1, round(sample_s / max(again, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for index in range(rounds):
        shuffle(order)  # no candidate always follows the same one, which leaves frequency and caches as they are
        for name in order:
            if index < quota[name]:
                samples[name].append(_sample(candidates[name], repeats[name], finish))
    return {
        name: Timing(min(values), statistics.median(values), max(values), len(values))
        for name, values in samples.items()
    }


def _sample(call: Call, repeats: int, finish: Call) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    finish()
    return (time.perf_counter() - start) / repeats


def machine() -> dict[str, Any]:
    """CPU, flags that matter to kernels, caches, memory."""
    facts: dict[str, Any] = {"system": platform.platform(), "cpus": len(os.sched_getaffinity(0))}
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        facts["cpu"] = cpu.get("model name", "")
        facts["family_model_stepping"] = [cpu.get(key, "") for key in ("cpu family", "model", "stepping")]
        present = set(cpu.get("flags", "").split())
        facts["flags"] = [flag for flag in FLAGS if flag in present]
        facts["memory_mib"] = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        facts["caches"] = [
            f"L{(at / 'level').read_text().strip()} {(at / 'type').read_text().strip()} "
            f"{(at / 'size').read_text().strip()}"
            for at in caches
        ]
    except (OSError, ValueError, IndexError):
        pass
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are timed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """The last commit of what is measured, "with changes" where files differ from it; "unknown" outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *MEASURED]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("log", "-1", "--format=%h") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def header() -> dict[str, Any]:
    """Everything about a run but its figures."""
    import lowbit

    return {
        "schema": 1,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "lowbit": dict(lowbit.info()),
        "load_average": os.getloadavg(),
    }


def describe(head: dict[str, Any]) -> str:
    """One paragraph on machine, versions and environment, printed above the tables."""
    cpu, found = head["machine"], head["versions"]
    env = " ".join(f"{key}={value}" for key, value in head["environment"].items() if value is not None)
    return "\n".join(
        [
            f"{cpu.get('cpu', '?')}, {cpu['cpus']} CPUs, {', '.join(cpu.get('caches', []))}; "
            f"{' '.join(cpu.get('flags', []))}",
            ", ".join(f"{name} {version}" for name, version in found.items()),
            f"lowbit isa: {head['lowbit']['isa chosen']}; torch: {head['torch_cpu_capability']}; environment: "
            f"{env or 'nothing set'}",
            f"command: {head['command']}",
        ]
    )


class Run:
    """One run of a benchmark: its header, printed, and other processes' time while it lasts."""

    def __init__(self) -> None:
        from lowbit.autotune.timing import OtherPrograms

        self.head = header()
        print(describe(self.head))
        self._foreign = OtherPrograms()

    def end(self, out: Path | None, results: Any, **more: Any) -> None:
        """Print the time of other processes, and write the result file, if one is wanted."""
        self.head["foreign_cpu_share"] = share = self._foreign.share()
        print(f"\nCPU time of other processes during the run: {100 * (share or 0):.0f} % of the machine")
        if out:
            save(out, self.head | more, results)
            print(f"wrote {out}")


def save(path: Path, head: dict[str, Any], results: Any) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: reads as text and pastes into docs."""
    lines = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text(lines[0]), rule, *map(text, lines[1:])])


def duration(seconds: float) -> str:
    """Three figures in the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            break
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
