# SPDX-License-Identifier: Apache-2.0
"""Rows of linear with int8 activations against each other: each instruction set that this machine has, on one layer,
and torch's dynamic quantized linear (oneDNN or FBGEMM) beside them.

    python benchmarks/bench_rows.py
"""

from __future__ import annotations

import argparse
import copy
import functools
import warnings
from collections.abc import Callable

import torch
from harness import duration, interleave, table

import lowbit
from lowbit import testing

FORMATS = {
    "W8A8 per channel": ("int8", lowbit.int8_dynamic_activation_int8_weight()),
    "W4A8 groups of 32": ("int4", lowbit.int8_dynamic_activation_int4_weight(group_size=32)),
    "W4A8 groups of 128": ("int4", lowbit.int8_dynamic_activation_int4_weight(group_size=128)),
}


def forced(layer: torch.nn.Module, row: str, x: torch.Tensor) -> torch.Tensor:
    with lowbit.force_kernel(row):
        return layer(x)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="features in and out")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    dense = torch.nn.Sequential(torch.nn.Linear(args.size, args.size, bias=False))
    peer = torch.ao.quantization.quantize_dynamic(copy.deepcopy(dense), {torch.nn.Linear}, dtype=torch.qint8)
    isas = [row["backend"] for row in testing.rows("linear") if row["available"] and "int8_int8" in str(row["name"])]
    cells: dict[str, list[str]] = {}
    for m in args.m:
        x = torch.randn(m, args.size)
        calls: dict[str, Callable[[], torch.Tensor]] = {"torch dynamic int8": functools.partial(peer, x)}
        for name, (format, config) in FORMATS.items():
            layer = copy.deepcopy(dense)
            lowbit.quantize_(layer, config)
            for isa in isas[:-1]:  # without scalar, which takes seconds
                call = functools.partial(forced, layer, f"linear_{format}_int8_{isa}", x)
                try:
                    call()
                except NotImplementedError:  # amx: fewer rows than a tile
                    continue
                calls[f"{name}, {isa}"] = call
        times = interleave(calls, rounds=args.rounds, sample_s=0.02)
        for name in calls:
            cells.setdefault(name, [""] * args.m.index(m)).append(duration(times[name].best_s))
        for name in cells.keys() - calls.keys():
            cells[name].append("")
    rows = [[name, *([""] * (len(args.m) - len(cell)) + cell)] for name, cell in cells.items()]
    print(f"{args.size} x {args.size}, {args.threads} threads, best of {args.rounds} interleaved rounds")
    print(table(["", *(f"M={m}" for m in args.m)], rows))


if __name__ == "__main__":
    main()
