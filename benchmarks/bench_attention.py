# SPDX-License-Identifier: Apache-2.0
"""Attention: lowbit, torch and the peers in the same interleaved rounds.

    python benchmarks/bench_attention.py --parts sdpa --quick        # 1 minute
    python benchmarks/bench_attention.py --out benchmarks/results/attention.json
    LOWBIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/bench_attention.py   # as an
    AVX2 machine

The part `decode` takes llama.cpp in when it is built: --ggml llama.cpp=/path/libggml.so
(docs/measured/linear.md says how).

Each part is a file attention_<part>.py beside this one. Ratios compare calls of the same rounds. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch
from ggml_linear import Library
from harness import Run

PARTS = tuple(sorted(path.stem.removeprefix("attention_") for path in Path(__file__).parent.glob("attention_*.py")))


def main() -> None:
    args = parse_arguments()
    run = Run()
    torch.manual_seed(0)
    results = {part: importlib.import_module(f"attention_{part}").bench(args) for part in args.parts}
    run.end(args.out, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--sdpa-shapes", help="BxHxLxD,... (default: nine, of 1 to 20 GFLOP)")
    parser.add_argument("--zentorch", help="folder of its wheel (cpu_peers.py), beside SDPA forward in bfloat16")
    parser.add_argument("--decode-lengths", help="tokens of a cache, no prompts (default 4096,16384, and prompts)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="samples of each candidate (default 8)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, 3 rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--ggml", action="append", default=[], help="NAME=PATH of libggml.so; names: ggml_linear.TYPES")
    args = parser.parse_args()
    args.libraries = [Library(name, Path(path)) for name, _, path in (given.partition("=") for given in args.ggml)]
    args.parts = args.parts.split(",")
    args.dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    shapes = args.sdpa_shapes.split(",") if args.sdpa_shapes else []
    args.sdpa_shapes = [tuple(int(size) for size in shape.split("x")) for shape in shapes]
    args.decode_lengths = [int(length) for length in args.decode_lengths.split(",")] if args.decode_lengths else []
    args.rounds = args.rounds or (3 if args.quick else 8)
    torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    main()
