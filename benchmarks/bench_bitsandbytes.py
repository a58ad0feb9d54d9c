# SPDX-License-Identifier: Apache-2.0
"""An unchanged program of bitsandbytes, with lowbit installed and without.

    python benchmarks/bench_bitsandbytes.py
    python benchmarks/bench_bitsandbytes.py --only Linear4bit --rounds 20 --n 11008 --k 4096

Each of three processes builds the same layers and optimizers of bitsandbytes, and they time a case in turns, one
at a time:
    lowbit      its entry point took bitsandbytes' ops
    bf16        bitsandbytes alone, on a CPU with AVX512-BF16 the kernel that it has for that (else as plain)
    plain       bitsandbytes alone as on a CPU without AVX512-BF16
Prints the best time of each in milliseconds, and how often lowbit's fits into the others'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MODES = ("lowbit", "bf16", "plain")
LAYERS = 4  # in turns, so that a weight comes from memory or the last cache
ROWS = (1, 4, 16, 128)


def linear_cases(n: int, k: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    def timed(make: Callable[[], torch.nn.Module], rows: int, dtype: torch.dtype) -> Callable[[], Any]:
        torch.manual_seed(0)
        layers = [make().to("cpu").eval() for _ in range(LAYERS)]
        x = torch.randn(rows, k).to(dtype)

        def run() -> None:
            with torch.inference_mode():
                for layer in layers:
                    layer(x)

        return run

    result = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for rows in ROWS:
            for nested in (False, True) if rows == 1 else (False,):
                make = lambda nested=nested, dtype=dtype: Linear4bit(  # noqa: E731
                    k, n, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type="nf4"
                )
                title = f"Linear4bit nf4{', nested' * nested}, {name}, {rows} rows"
                result[title] = lambda make=make, rows=rows, dtype=dtype: timed(make, rows, dtype)
            make = lambda: Linear8bitLt(k, n, bias=False, has_fp16_weights=False)  # noqa: E731
            title = f"Linear8bitLt, {name}, {rows} rows"
            result[title] = lambda make=make, rows=rows, dtype=dtype: timed(make, rows, dtype)
    return result


def optimizer_cases(numel: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    import torch
    from bitsandbytes import functional, optim

    def step(name: str, dtype: torch.dtype) -> Callable[[], Any]:
        p = torch.nn.Parameter(torch.randn(numel).to(dtype))
        p.grad = torch.randn(numel).to(dtype)
        return getattr(optim, name)([p], **({"momentum": 0.9, "lr": 1e-3} if name == "SGD8bit" else {})).step

    def quantize() -> Callable[[], Any]:
        x = torch.randn(numel)
        return lambda: functional.quantize_blockwise(x, blocksize=256)

    result: dict[str, Callable[[], Callable[[], Any]]] = {"quantize_blockwise": quantize}
    for name in ("AdamW8bit", "Lion8bit", "SGD8bit", "AdamW32bit"):
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            result[title] = lambda name=name, dtype=dtype: step(name, dtype)
    return result


def work(mode: str, options: argparse.Namespace) -> None:
    """Answer each line, the title of a case, with the seconds of one call."""
    import bitsandbytes
    import torch

    from lowbit.peers import bitsandbytes_ops

    torch.set_num_threads(options.threads)
    if mode == "lowbit":
        if not bitsandbytes_ops.states:  # lowbit is not installed, only imported from here
            bitsandbytes_ops.take_ops()
        left = {op: state for op, state in bitsandbytes_ops.states.items() if state != "ours"}
        if left:
            raise SystemExit(f"not ours: {left}")
    if mode == "plain":
        bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    cases = linear_cases(options.n, options.k) | optimizer_cases(options.numel)
    print(json.dumps([title for title in cases if options.only in title]), flush=True)
    title, run = "", None
    for line in sys.stdin:
        if line.strip() != title:
            title = line.strip()
            run = cases[title]()
            run()
        assert run is not None
        start = time.perf_counter()
        run()
        print(json.dumps(time.perf_counter() - start), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24, help="of the parameter of an optimizer")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="cases with this in their title")
    parser.add_argument("--work", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options)
    workers = {}
    for mode in MODES:
        threads = str(options.threads)
        environment = os.environ | {"LOWBIT_BITSANDBYTES": str(int(mode == "lowbit")), "OMP_NUM_THREADS": threads}
        command = [sys.executable, *sys.argv, "--work", mode]
        workers[mode] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def answer(mode: str, line: str = "") -> Any:
        process = workers[mode]
        assert process.stdin is not None and process.stdout is not None
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline())

    titles = [answer(mode) for mode in MODES][0]
    sizes = f"weights [{options.n}, {options.k}], {LAYERS} of them a call; {options.numel} elements"
    print(f"{options.threads} threads; {sizes}")
    print(f"{'':42}" + "".join(f"{mode + ' ms':>12}" for mode in MODES) + f"{'bf16 /':>9}{'plain /':>9}")
    for title in titles:
        best = dict.fromkeys(MODES, float("inf"))
        for _ in range(options.rounds):
            for mode in MODES:
                best[mode] = min(best[mode], 1e3 * answer(mode, title))
        ratios = "".join(f"{best[mode] / best['lowbit']:8.1f}x" for mode in MODES[1:])
        print(f"{title:42}" + "".join(f"{best[mode]:12.2f}" for mode in MODES) + ratios, flush=True)
    for process in workers.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
