# SPDX-License-Identifier: Apache-2.0
"""Linear layers of two builds of the library in turns: two compilers, or before and after a change.

    python benchmarks/bench_builds.py build/dev/csrc build/clang/csrc

Each folder has a liblowbit.so and a _C. Each build runs in a process of its own, beside the Python files of this tree;
the processes take turns, and the best time of each counts. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python" / "lowbit"
LAYERS = {
    "W4A8 g32": "int8_dynamic_activation_int4_weight(group_size=32)",
    "W8A8": "int8_dynamic_activation_int8_weight()",
    "int4 weight-only g128": "int4_weight_only(group_size=128)",
}

WORKER = """
import sys, time, torch, lowbit
threads, size, sample = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(threads)
layers = {}
for config in sys.argv[4:]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False))
    lowbit.quantize_(model, config)
    layers[config] = model[0]
inputs = {}
for line in sys.stdin:
    config, m = line.rsplit(" ", 1)
    x = inputs.setdefault(m, torch.randn(int(m), size))
    layer, best, end = layers[config], float("inf"), time.perf_counter() + sample
    with torch.inference_mode():
        while time.perf_counter() < end:
            began = time.perf_counter()
            layer(x)
            best = min(best, time.perf_counter() - began)
    print(best, flush=True)
"""


def package_of(folder: Path, into: Path) -> Path:
    """Return a folder for PYTHONPATH: links to the files of this tree and to the libraries of a build."""
    package = into / folder.parent.name / "lowbit"
    package.mkdir(parents=True)
    for file in PACKAGE.iterdir():
        if file.suffix != ".so":
            (package / file.name).symlink_to(file)
    for library in folder.glob("*.so"):
        (package / library.name).symlink_to(library.resolve())
    return package.parent


def worker(path: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        WORKER,
        str(args.threads),
        str(args.size),
        str(args.sample_ms / 1e3),
        *LAYERS.values(),
    ]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(path)}
    )


def asked(process: subprocess.Popen[str], config: str, m: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{config} {m}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", type=Path, nargs=2, help="folders with liblowbit.so and _C")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 32, 512], help="rows of the activations")
    parser.add_argument("--size", type=int, default=4096, help="n and k of the layers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sample-ms", type=float, default=40.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as into:
        processes = [worker(package_of(build.resolve(), Path(into)), args) for build in args.builds]
        names = [build.resolve().parent.name for build in args.builds]
        print(
            f"| | M | {names[0]}, ms | {names[1]}, ms | {names[1]} / {names[0]}, median of rounds |\n|---|---|---|---|---|"
        )
        for name, config in LAYERS.items():
            for m in args.m:
                rounds = [[asked(process, config, m) for process in processes] for _ in range(args.rounds)]
                best = [min(times) * 1e3 for times in zip(*rounds, strict=True)]
                ratio = statistics.median(second / first for first, second in rounds)
                print(f"| {name} | {m} | {best[0]:.3f} | {best[1]:.3f} | {ratio:.2f} |", flush=True)
        for process in processes:
            process.communicate()


if __name__ == "__main__":
    main()
