# SPDX-License-Identifier: Apache-2.0
"""Rows of linear against each other: each instruction set that this machine has, on one layer, and torch beside them:
its dynamic quantized linear (oneDNN or FBGEMM) beside int8 activations, its linear of the same dtype beside floats.

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

INT8, INT4 = lowbit.int8_weight_only(), lowbit.int4_weight_only
LAYERS = {  # the row without its instruction set, the dtype of weight and activations
    "W8A8 per channel": ("int8_int8", "float32", lowbit.int8_dynamic_activation_int8_weight()),
    "W4A8 groups of 32": ("int4_int8", "float32", lowbit.int8_dynamic_activation_int4_weight(group_size=32)),
    "W4A8 groups of 128": ("int4_int8", "float32", lowbit.int8_dynamic_activation_int4_weight(group_size=128)),
    "bfloat16": ("bfloat16", "bfloat16", lowbit.float_weight()),
    "int8, bfloat16": ("int8", "bfloat16", INT8),
    "int4 groups of 32, bfloat16": ("int4", "bfloat16", INT4(group_size=32)),
    "int4 groups of 128, bfloat16": ("int4", "bfloat16", INT4(group_size=128)),
    "float32": ("float32", "float32", lowbit.float_weight()),
    "int8, float32": ("int8", "float32", INT8),
    "int4 groups of 32, float32": ("int4", "float32", INT4(group_size=32)),
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
    parser.add_argument("--only", default="", help="part of the names of layers")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    dense = torch.nn.Sequential(torch.nn.Linear(args.size, args.size, bias=False))
    peers: dict[str, torch.nn.Module] = {
        "torch dynamic int8": torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(dense), {torch.nn.Linear}, dtype=torch.qint8
        ),
        "torch bfloat16": copy.deepcopy(dense).bfloat16(),
        "torch float32": dense,
    }
    isas = list(dict.fromkeys(str(row["backend"]) for row in testing.rows("linear") if row["available"]))
    cells: dict[str, list[str]] = {}
    for m in args.m:
        x = {name: torch.randn(m, args.size).to(getattr(torch, name)) for name in ("float32", "bfloat16")}
        calls: dict[str, Callable[[], torch.Tensor]] = {
            name: functools.partial(peer, x["bfloat16" if "bfloat16" in name else "float32"])
            for name, peer in peers.items()
        }
        for name, (row, dtype, config) in LAYERS.items():
            if args.only not in name:
                continue
            layer = copy.deepcopy(dense).to(getattr(torch, dtype))
            lowbit.quantize_(layer, config)
            for isa in isas[:-1]:  # without scalar, which takes seconds
                call = functools.partial(forced, layer, f"linear_{row}_{isa}", x[dtype])
                try:
                    call()
                except (NotImplementedError, ValueError):  # amx: fewer rows than a tile; avx512_vnni: no float rows
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
