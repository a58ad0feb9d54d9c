# SPDX-License-Identifier: Apache-2.0
"""A step of training with int8 products beside torch in float32 and bfloat16, and beside torchao's: forward and
backward of the linear layers that a 1B-shaped block has, without the optimizer, which does the same for all.

    python benchmarks/bench_int8_training.py
    LOWBIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python ...   # as AVX2
"""

from __future__ import annotations

import argparse
import copy

import torch
from harness import Run, duration, forward_and_backward, interleave, options, table
from torch import nn

import lowbit
from lowbit.training import Int8MixedPrecisionTrainingConfig, Int8WeightOnlyQuantizedTrainingConfig

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192))  # (n, k)


def torchao(dense: nn.Module) -> nn.Module | None:
    """torchao's int8 mixed precision, where it is installed."""
    try:
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig as Peer
        from torchao.quantization import quantize_
    except ImportError:
        return None
    made = copy.deepcopy(dense)
    quantize_(made, Peer())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="n x k of the layers")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", default="", help="part of the names; those of torch are always there")
    args = options(parser, rounds=6)
    run, results, rows = Run(), {}, {}
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        dense = nn.Sequential(nn.Linear(k, n, bias=False))
        models: dict[str, nn.Module | None] = {
            "torch float32": dense,
            "torch bfloat16": copy.deepcopy(dense).bfloat16(),
        }
        made: dict[str, nn.Module | None] = {}
        for dtype in ("float32", "bfloat16"):
            for what, config in (
                ("products", Int8MixedPrecisionTrainingConfig()),
                ("products but grad_weight", Int8MixedPrecisionTrainingConfig(grad_weight=False)),
                ("weight", Int8WeightOnlyQuantizedTrainingConfig()),
            ):
                layer = made[f"int8 {what}, {dtype}"] = copy.deepcopy(models[f"torch {dtype}"])
                lowbit.quantize_(layer, config)
            made[f"torchao int8 products, {dtype}"] = torchao(models[f"torch {dtype}"])
        models |= {name: layer for name, layer in made.items() if layer is not None and args.only in name}
        x, grad = torch.randn(args.tokens, k), torch.randn(args.tokens, n)
        dtypes = {name: next(layer.parameters()).dtype for name, layer in models.items()}
        calls = {name: forward_and_backward(layer, x.to(dtypes[name]), grad.to(dtypes[name]))
                 for name, layer in models.items()}  # fmt: skip
        for name, timing in interleave(calls, rounds=args.rounds, warmup=1, slow_s=60).items():
            results[f"{name}, {shape}"] = timing.best_s
            ratios = [f"{results[f'torch {of}, {shape}'] / timing.best_s:.2f}x" for of in ("float32", "bfloat16")
                      if f"torch {of}, {shape}" in results]  # fmt: skip
            rows.setdefault(name, []).extend([duration(timing.best_s), *ratios, *[""] * (2 - len(ratios))])
    print(f"{args.tokens} tokens, {args.threads} threads, best of {args.rounds} interleaved rounds")
    columns = [text for shape in args.shapes.split(",") for text in (shape, "of float32", "of bfloat16")]
    print(table(["forward and backward", *columns], [[name, *cells] for name, cells in rows.items()]))
    run.end(args.out, results)


if __name__ == "__main__":
    main()
