# SPDX-License-Identifier: Apache-2.0
"""flex_attention in eager mode against torch's compiled one (its only fast way on the CPU): forward with mods and
masks, first calls, block masks.

Our backward has no peer on the CPU: it is given as a multiple of our forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import duration, interleave, table
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import lowbit

B, H, L, D = 1, 4, 2048, 64
BIAS, SLOPES, IDS = torch.randn(H, L, L), torch.rand(H), torch.arange(L) // 300
MODS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "ALiBi": lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "bias": lambda s, b, h, q, k: s + BIAS[h, q, k],
    "4 ops": lambda s, b, h, q, k: (s * s - 0.5 * s).abs() + 0.1,
}
MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window 256": lambda b, h, q, k: (q >= k) & (q - k < 256),
    "prefix 512": lambda b, h, q, k: (k < 512) | (q >= k),
    "document": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
}
QUICK = ("none", "ALiBi", "causal", "window 256")


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every mod and mask; print three tables."""
    results: list[dict[str, Any]] = []
    names = [name for name in (*MODS, *MASKS) if not args.quick or name in QUICK]
    for dtype in args.dtypes:
        found = [measure(args, name, dtype) for name in names]
        base = found[0]["lowbit_s"]
        rows = [
            [
                r["name"], duration(r["torch_s"]), duration(r["lowbit_s"]), f"{r['torch_s'] / r['lowbit_s']:.1f}x",
                f"{r['lowbit_s'] / base:.2f}",
                f"{r['torch_first_s']:.1f} s", duration(r["lowbit_first_s"]), f"{r['backward_s'] / r['lowbit_s']:.1f}",
            ]
            for r in found
        ]  # fmt: skip
        print(f"\nflex_attention {B}x{H}x{L}x{D} {str(dtype).removeprefix('torch.')}, {args.threads} threads")
        print(
            table(
                [
                    "",
                    "torch compiled",
                    "lowbit",
                    "ratio",
                    "over none",
                    "torch first call",
                    "first call",
                    "backward / forward",
                ],
                rows,
            )
        )
        results += found
    results += lengths(args) + block_masks(args)
    return results


def measure(args: argparse.Namespace, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One row: both candidates, interleaved, and how long their first calls took."""
    q, k, v = (torch.randn(B, H, L, D).to(dtype) for _ in range(3))
    mod, mask_mod = MODS.get(name), MASKS.get(name)
    mask = None if mask_mod is None else lowbit.create_block_mask(mask_mod, None, None, L, L)
    torch._dynamo.reset()
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True)
    first = {}
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: compiled(q, k, v, mod, mask),
        "lowbit": lambda: lowbit.flex_attention(q, k, v, mod, mask),
    }
    for candidate, call in calls.items():
        start = time.perf_counter()
        call()
        first[candidate] = time.perf_counter() - start
    times = interleave(calls, rounds=args.rounds, sample_s=0.05, warmup=1)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = lowbit.flex_attention(*inputs, mod, mask)
    grad = torch.randn_like(out)
    backward = interleave(
        {"lowbit": lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)},
        rounds=args.rounds,
        sample_s=0.05,
        warmup=1,
    )
    return {
        "name": name, "dtype": str(dtype).removeprefix("torch."), "torch_s": times["torch"].best_s,
        "lowbit_s": times["lowbit"].best_s,
        "backward_s": backward["lowbit"].best_s, "torch_first_s": first["torch"], "lowbit_first_s": first["lowbit"],
    }  # fmt: skip


def lengths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cost of a window of 256 is that of its keys: time per query must not grow with the length."""
    results = []
    for length in (2048, 4096, 8192, 16384)[: 2 if args.quick else 4]:
        q, k, v = (torch.randn(1, 4, length, D) for _ in range(3))
        mask = lowbit.create_block_mask(MASKS["window 256"], None, None, length, length)
        call = {"lowbit": lambda q=q, k=k, v=v, mask=mask: lowbit.flex_attention(q, k, v, block_mask=mask)}
        seconds = interleave(call, rounds=args.rounds, sample_s=0.05, warmup=1)["lowbit"].best_s
        results.append({"name": "window 256", "length": length, "lowbit_s": seconds})
    print("\nwindow of 256, float32")
    print(
        table(
            ["length", "time", "per query"],
            [[str(r["length"]), duration(r["lowbit_s"]), duration(r["lowbit_s"] / r["length"])] for r in results],
        )
    )
    return results


def block_masks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """create_block_mask 8192 x 8192."""
    ids = torch.arange(8192) // 700
    masks = MASKS | {"document": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)}
    results = []
    for name, mask_mod in masks.items():
        calls: dict[str, Callable[[], Any]] = {
            "lowbit": lambda m=mask_mod: lowbit.create_block_mask(m, None, None, 8192, 8192)
        }
        ours = interleave(calls, rounds=args.rounds, sample_s=0.02, warmup=1)["lowbit"].best_s
        start = time.perf_counter()
        torch_flex.create_block_mask(mask_mod, None, None, 8192, 8192, "cpu")
        results.append({"name": f"create_block_mask {name}", "lowbit_s": ours, "torch_s": time.perf_counter() - start})
    print("\ncreate_block_mask 8192 x 8192 (torch: one call)")
    print(
        table(
            ["", "torch", "lowbit"],
            [
                [r["name"].removeprefix("create_block_mask "), duration(r["torch_s"]), duration(r["lowbit_s"])]
                for r in results
            ],
        )
    )
    return results
