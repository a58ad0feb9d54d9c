# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention against torch's, forward and backward: heads shrink as lengths grow, so that every row
is 1 to 20 GFLOP."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import cpu_peers
import torch
from harness import duration, interleave, table
from torch import Tensor
from torch.nn import functional

import lowbit

# B, H, L, D.
SHAPES = (
    (1, 8, 512, 64),
    (1, 8, 512, 128),
    (1, 4, 1024, 64),
    (1, 4, 2048, 64),
    (1, 4, 2048, 128),
    (1, 8, 2048, 128),
    (1, 2, 4096, 64),
    (1, 2, 4096, 128),
    (1, 1, 4096, 64),
)
QUICK = ((1, 8, 512, 64), (1, 4, 2048, 128))
Attention = Callable[..., Tensor]
CANDIDATES: dict[str, Attention] = {
    "torch": functional.scaled_dot_product_attention,
    "lowbit": lowbit.scaled_dot_product_attention,
}
TARGETS = {
    ("forward", "float32"): 1.2,
    ("backward", "float32"): 1.2,
    ("backward", "bfloat16"): 5.0,
    ("backward", "float16"): 5.0,
}


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both directions at every shape; print a table per direction."""
    results: list[dict[str, Any]] = []
    for direction in ("forward", "backward"):
        rows = []
        for shape in args.sdpa_shapes or (QUICK if args.quick else SHAPES):
            for causal in (False, True):
                found = [measure(args, direction, shape, dtype, causal) for dtype in args.dtypes]
                results += found
                cells = (_cell(r) for r in found)
                own = " ".join(f"{found[0]['lowbit_s'] / r['lowbit_s']:.2f}" for r in found[1:])
                rows.append(
                    [
                        "x".join(map(str, shape)) + (" causal" if causal else " full"),
                        *cells,
                        f"{found[0]['gflop_per_s']:.0f}",
                        own,
                    ]
                )
        names = [str(dtype).removeprefix("torch.") for dtype in args.dtypes]
        targets = ", ".join(f"{dtype} {ratio}x" for (d, dtype), ratio in TARGETS.items() if d == direction)
        print(f"\nSDPA {direction}, {args.threads} threads: torch / lowbit = ratio (wanted: {targets})")
        first, *others = names
        print(
            table(["BxHxLxD", *names, f"GFLOP/s {first}", f"{' '.join(others)} over {first}" if others else ""], rows)
        )
    return results


def _cell(result: dict[str, Any]) -> str:
    beside = f"; zentorch {result['zentorch_s'] / result['lowbit_s']:.2f}x" if "zentorch_s" in result else ""
    return f"{duration(result['torch_s'])} / {duration(result['lowbit_s'])} = {result['ratio']:.2f}x{beside}"


def measure(
    args: argparse.Namespace, direction: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> dict[str, Any]:
    """One row: the candidates, interleaved."""
    b, h, length, d = shape
    q, k, v = (torch.randn(b, h, length, d).to(dtype) for _ in range(3))
    make = forward_call if direction == "forward" else backward_call
    candidates, zentorch = dict(CANDIDATES), cpu_peers.zentorch(args.zentorch)
    if zentorch is not None and (direction, dtype) == ("forward", torch.bfloat16):
        candidates["zentorch"] = lambda q, k, v, is_causal: zentorch.zentorch_sdpa(q, k, v, 0.0, is_causal)[0]
        error = float((candidates["zentorch"](q, k, v, causal) - CANDIDATES["torch"](q, k, v, is_causal=causal)).norm())
        if not error < 0.02 * float(v.norm()):
            raise RuntimeError(f"zentorch_sdpa differs from torch by {error}: its arguments are not as meant")
    times = interleave(
        {name: make(f, (q, k, v), causal) for name, f in candidates.items()},
        rounds=args.rounds,
        sample_s=0.05,
        warmup=1,
    )
    flop = 4 * b * h * length * length * d * (0.5 if causal else 1) * (1 if direction == "forward" else 2.5)
    return {
        "direction": direction, "shape": shape, "dtype": str(dtype).removeprefix("torch."), "causal": causal,
        "torch_s": times["torch"].best_s, "lowbit_s": times["lowbit"].best_s,
        "ratio": times["torch"].best_s / times["lowbit"].best_s,
        "gflop_per_s": flop / times["lowbit"].best_s / 1e9,
    } | ({"zentorch_s": times["zentorch"].best_s} if "zentorch" in times else {})  # fmt: skip


def forward_call(function: Attention, tensors: tuple[Tensor, ...], causal: bool) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*tensors, is_causal=causal)

    return run


def backward_call(function: Attention, tensors: tuple[Tensor, ...], causal: bool) -> Callable[[], object]:
    """The backward alone, of a forward that is kept."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = function(*inputs, is_causal=causal)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
