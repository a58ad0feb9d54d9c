# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon: lowbit, torch.optim.Muon, and the same with steps in float32, on the matrices of one layer.

    python benchmarks/bench_muon.py --threads 2                # SmolLM2-135M
    python benchmarks/bench_muon.py --shapes 2048x2048 --no-bfloat16

torch takes Newton-Schulz steps in bfloat16, which it multiplies slowly where the processor does not. "torch, float32" is
its algorithm with float32 products, the fastest that torch's ops give on such a machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import Run, duration, interleave, options, table
from torch import Tensor, nn

from lowbit import optim

SMOLLM2 = "576x576,192x576,192x576,576x576,1536x576,1536x576,576x1536"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Float32Muon(torch.optim.Optimizer):
    """torch's formulas, with products in float32."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            moment.lerp_(p.grad, 0.05)
            p.mul_(1 - 1e-3 * 0.1)
            p.add_(orthogonalized(p.grad.lerp(moment, 0.95)), alpha=-1e-3 * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SMOLLM2)
    parser.add_argument("--no-bfloat16", action="store_true", help="without torch.optim.Muon itself, which may be slow")
    given = options(parser, rounds=6)
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(",")]
    entrants: dict[str, Any] = {} if given.no_bfloat16 else {"torch": torch.optim.Muon}
    entrants |= {"torch, float32": Float32Muon, "Muon": optim.Muon, "Muon8bit": optim.Muon8bit}
    run = Run()
    calls = {name: make(parameters(shapes)).step for name, make in entrants.items()}
    times = interleave(calls, rounds=given.rounds, sample_s=0.0, warmup=1, slow_s=2.0)
    rows = [
        [name, duration(time.best_s), *(f"{times[other].best_s / time.best_s:.2f}x" for other in list(times)[:-2])]
        for name, time in times.items()
    ]
    columns = [f"Muon, {given.shapes}", "step", *(f"speed of {other}" for other in list(times)[:-2])]
    print(table(columns, rows), flush=True)
    run.end(given.out, {name: time.best_s for name, time in times.items()})


if __name__ == "__main__":
    main()
