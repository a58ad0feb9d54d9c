# SPDX-License-Identifier: Apache-2.0
"""Time of a linear layer with block-sparse weights: lowbit's, torch's BSR, and torch's dense layer, whose zeros it
multiplies too.

    python benchmarks/bench_block_sparse.py
    python benchmarks/bench_block_sparse.py --dtype bfloat16 --threads 1 --sparsity 0.5 0.9

torch's BSR on a CPU has no bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import warnings

import torch
from harness import describe, duration, header, interleave, table
from torch import nn
from torch.nn import functional

import lowbit


def layers_of(n: int, k: int, dtype: torch.dtype, block: int, sparsity: float) -> dict[str, object]:
    """The dense layer, ours, and torch's of the same blocks."""
    ours = nn.Linear(k, n, bias=False, dtype=dtype).requires_grad_(False)
    lowbit.sparsify_(ours, lowbit.block_sparse_weight(block, sparsity=sparsity))
    dense = ours.dequantize()
    calls = {"torch dense": functools.partial(functional.linear, weight=dense), "lowbit": ours}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that BSR is in beta
        bsr = torch.sparse_bsr_tensor(ours.crow_indices, ours.col_indices, ours.weight, (n, k))
    try:
        functional.linear(dense.new_ones(2, k), bsr)
        calls["torch BSR"] = functools.partial(functional.linear, weight=bsr)
    except NotImplementedError:
        pass
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe(header()))
    lines = []
    with torch.inference_mode():
        for sparsity in args.sparsity:
            calls = layers_of(args.n, args.k, getattr(torch, args.dtype), args.block, sparsity)
            for rows in args.rows:
                x = torch.randn(rows, args.k, dtype=getattr(torch, args.dtype))
                bound = {name: functools.partial(call, x) for name, call in calls.items()}
                times = interleave(bound, rounds=args.rounds)
                dense, ours = times["torch dense"].best_s, times["lowbit"].best_s
                of_torch = duration(times["torch BSR"].best_s) if "torch BSR" in times else "none"
                lines.append([f"{sparsity:.0%}", str(rows), duration(dense), of_torch, duration(ours),
                              f"{dense / ours:.1f}x"])  # fmt: skip
    print(f"{args.n} x {args.k} {args.dtype}, blocks of {args.block}, {args.threads} threads, best of {args.rounds}")
    print(table(["zeros", "rows", "torch dense", "torch BSR", "lowbit", "dense / lowbit"], lines))


if __name__ == "__main__":
    main()
