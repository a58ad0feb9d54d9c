# SPDX-License-Identifier: Apache-2.0
"""Time of gather_linear, the product of a mixture of experts, against its bounds: the reading of the bytes of the
weights that are hit, and a dense product of as many rows as each weight has.

    python benchmarks/bench_gather_linear.py
    python benchmarks/bench_gather_linear.py --config "int8 int8_row" --tokens 1 64 512

Each call has a fresh index; the weights are more than the caches hold. The dense product has the rows of all weights
evenly: weight by weight, tokens * experts a token / E rows each.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from harness import MIB, Call, describe, duration, header, interleave, options, rotate, table

from lowbit import _C, testing
from lowbit.ops.gather_linear import gather_linear

FORMATS = {
    "int4 32 int8_group": ("int4", 32, "int8_group"),
    "int8 int8_row": ("int8", 0, "int8_row"),
    "int4 32 float": ("int4", 32, "float"),
    "bfloat16 float": ("bfloat16", 0, "float"),
}
INDICES = 12  # fresh ones, in turns


def packed_weights(count: int, n: int, k: int, format: str, group_size: int) -> torch.Tensor:
    """Weights that differ in memory and not in numbers: quantizing each takes longer than the benchmark."""
    one = testing.pack_weight(torch.randn(n, k) / k**0.5, format, group_size)
    return one.expand(count, *one.shape).contiguous()


def calls_of(args: argparse.Namespace, config: str, tokens: int) -> tuple[dict[str, Call], float]:
    """The calls, and the bytes that one of ours reads on average."""
    format, group_size, x_format = FORMATS[config]
    weight = packed_weights(args.weights, args.n, args.k, format, group_size)
    op_args = (args.n, args.k, _C.FORMATS[format], group_size, False, _C.X_FORMATS[x_format])
    x = torch.randn(tokens, args.k, dtype=getattr(torch, args.dtype))
    indices = [torch.rand(tokens, args.weights).topk(args.each).indices for _ in range(INDICES)]
    rows = max(1, tokens * args.each // args.weights)
    dense = [torch.randn(rows, args.k, dtype=x.dtype) for _ in range(args.weights)]
    hit = sum(len(index.unique()) for index in indices) / INDICES

    def product_by_product() -> None:
        for one, rows_of_one in zip(weight, dense, strict=True):
            torch.ops.lowbit.linear(rows_of_one, one, *op_args)

    calls: dict[str, Call] = {
        "gather_linear": rotate([lambda index=index: gather_linear(x, weight, index, op_args) for index in indices]),
        "dense": product_by_product,
    }
    return calls, hit * weight[0].nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1536)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--weights", type=int, default=128)
    parser.add_argument("--each", type=int, default=8, help="weights a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--config", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = options(parser, rounds=12, threads=2)
    print(describe(header()))
    lines = []
    with torch.inference_mode():
        for config, tokens in itertools.product(args.config, args.tokens):
            calls, hit_bytes = calls_of(args, config, tokens)
            rates = [_C.read_bandwidth(256 * MIB, streams, args.threads, 3) for streams in (1, 4)]
            times = interleave(calls, rounds=args.rounds)
            rates += [_C.read_bandwidth(256 * MIB, streams, args.threads, 3) for streams in (1, 4)]
            ours, reading = times["gather_linear"].best_s, hit_bytes / max(rates) / 1e9
            dense = times["dense"].best_s
            lines.append([config, str(tokens), f"{hit_bytes / 1e6:.0f} MB", duration(ours), duration(reading),
                          f"{ours / reading:.2f}", duration(dense), f"{ours / dense:.2f}"])  # fmt: skip
    title = f"{args.weights} weights of {args.n} x {args.k}, {args.each} a token, {args.dtype}, {args.threads} threads"
    print(f"{title}, best of {args.rounds}")
    print(
        table(
            ["format", "tokens", "weights hit", "gather_linear", "reading them", "/ reading", "dense", "/ dense"], lines
        )
    )


if __name__ == "__main__":
    main()
