# SPDX-License-Identifier: Apache-2.0
"""A step of float8 training beside the float step and torchao's emulation: forward and backward of linear layers,
without the optimizer, which does the same for all.

    python benchmarks/bench_float8_training.py
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace

import torch
from harness import Run, duration, forward_and_backward, interleave, options, table
from torch import nn

from lowbit.training import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

RECIPES = [name.value for name in Float8LinearRecipeName]


def models_of(dense: nn.Module, peers: bool) -> dict[str, nn.Module]:
    """The float layer, ours by recipe, and torchao's emulation where it is installed and wanted."""
    models = {"float": dense}
    for recipe in RECIPES:
        config = Float8LinearConfig.from_recipe_name(recipe)
        models[recipe] = convert_to_float8_training(copy.deepcopy(dense), config=config)
    if not peers:
        return models
    try:
        import torchao.float8 as ao
    except ImportError:
        return models
    for recipe in RECIPES:
        config = replace(ao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        models[f"torchao {recipe}"] = ao.convert_to_float8_training(copy.deepcopy(dense), config=config)
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="2048x2048,8192x2048", help="n x k")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--no-peers", action="store_true")
    args = options(parser, rounds=5)
    run, results, rows, columns = Run(), {}, {}, []
    for dtype in args.dtypes.split(","):
        for shape in args.shapes.split(","):
            n, k = map(int, shape.split("x"))
            dense = nn.Sequential(nn.Linear(k, n, bias=False)).to(getattr(torch, dtype))
            x, grad = (torch.randn(args.tokens, size).to(getattr(torch, dtype)) for size in (k, n))
            models = models_of(dense, not args.no_peers)
            calls = {name: forward_and_backward(model, x, grad) for name, model in models.items()}
            columns += [f"{dtype}, {shape}", "of float"]
            for name, timing in interleave(calls, rounds=args.rounds, warmup=1, slow_s=30).items():
                results[f"{name}, {dtype}, {shape}"] = timing.best_s
                ratio = timing.best_s / results[f"float, {dtype}, {shape}"]
                rows.setdefault(name, []).extend([duration(timing.best_s), f"{ratio:.2f}x"])
    print(f"{args.tokens} tokens, {args.threads} threads, best of {args.rounds} interleaved rounds")
    print(table(["forward and backward", *columns], [[name, *cells] for name, cells in rows.items()]))
    run.end(args.out, results)


if __name__ == "__main__":
    main()
