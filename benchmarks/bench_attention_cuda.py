# SPDX-License-Identifier: Apache-2.0
"""Attention on an NVIDIA GPU: our rows, torch's SDPA by each of its backends and torch's compiled flex_attention, in
the same interleaved rounds.

    python benchmarks/bench_attention_cuda.py --out benchmarks/results/attention_cuda.json
    python benchmarks/bench_attention_cuda.py --device cpu --shapes 1x2x2x256x64   # that it runs, on a machine without

Forward is a replay of a CUDA graph, backward a call of autograd. TFLOP/s count 2 products of the forward and 5 of the
backward, half of that under causality. Ratios are against the fastest of torch's in the same run. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from harness import describe, duration, header, interleave, save, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

import lowbit
from lowbit import _C

OWN = ("attention_forward_tiles_cuda", "attention_forward_wgmma_cuda")  # also where cuDNN serves the call
BACKENDS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    args = parse_arguments()
    head = header() | {"gpu": torch.cuda.get_device_name() if args.device == "cuda" else "none"}
    print(describe(head), head["gpu"])
    results = [row for shape in args.shapes for what in args.what for row in measure(args, shape, what)]
    if args.out:
        save(args.out, head, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", default="4x32x8x2048x128,2x32x8x8192x128,4x32x32x2048x64", help="BxHqxHkvxLxE,...")
    parser.add_argument("--what", default="plain,causal,softcap,alibi,window,document")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes.split(",")]
    args.what = args.what.split(",")
    return args


def mods(what: str, length: int, device: str) -> tuple[Any, Any]:
    """score_mod and mask_mod."""
    document = torch.arange(length, device=device) // 700
    score = {
        "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
        "alibi": lambda s, b, h, q, k: s + (k - q) * 0.5 ** (h * 0.25 + 1),
    }
    mask = {
        "alibi": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "document": lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
    }
    return score.get(what), mask.get(what)


def candidates(args: argparse.Namespace, what: str, shape: tuple[int, ...]) -> dict[str, Attention]:
    _, hq, hkv, length, _ = shape
    options: dict[str, Any] = {"enable_gqa": hq != hkv}
    if what in ("plain", "causal"):
        options |= {"is_causal": what == "causal"}
        made: dict[str, Attention] = {"lowbit": lambda q, k, v: lowbit.scaled_dot_product_attention(q, k, v, **options)}
        for name, backend in BACKENDS.items():
            made[name] = lambda q, k, v, backend=backend: by_backend(backend, q, k, v, options)
        return (
            made
            if args.device == "cuda"
            else {"lowbit": made["lowbit"], "torch": lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)}
        )
    score, mask_mod = mods(what, length, args.device)
    mask = (
        None
        if mask_mod is None
        else torch_flex.create_block_mask(mask_mod, None, None, length, length, device=args.device)
    )
    functorch.donated_buffer = False  # a backward is called again and again
    compiled = torch.compile(torch_flex.flex_attention)
    return {"lowbit": lambda q, k, v: lowbit.flex_attention(q, k, v, score, mask, **options),
            "torch compiled flex": lambda q, k, v: compiled(q, k, v, score, mask, **options)}  # fmt: skip


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, **options)


def by_row(row: str, call: Attention) -> Attention:
    def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        previous = _C.force_kernel(row)
        try:
            return call(q, k, v)
        finally:
            _C.force_kernel(previous or None)

    return forced


def measure(args: argparse.Namespace, shape: tuple[int, ...], what: str) -> list[dict[str, Any]]:
    b, hq, hkv, length, e = shape
    q, k, v = (torch.randn(b, h, length, e, device=args.device, dtype=torch.bfloat16) for h in (hq, hkv, hkv))
    grad = torch.randn_like(q)
    everyone = candidates(args, what, shape)
    if args.device == "cuda":
        everyone |= {row: by_row(row, everyone["lowbit"]) for row in OWN}
    forward, backward = {}, {}
    for name, call in everyone.items():
        try:
            forward[name] = sample(args, lambda call=call: call(q, k, v))
            if name not in OWN and args.device == "cuda":  # which row a backward takes is not this thread's to say
                leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
                out = call(*leaves)
                backward[name] = lambda out=out, leaves=leaves: torch.autograd.grad(
                    out, leaves, grad, retain_graph=True
                )
                backward[name]()
        except Exception as error:  # a peer that is not here, or a row that refuses the call
            if name == "lowbit" or (name in OWN and not isinstance(error, NotImplementedError)):
                raise
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            forward.pop(name, None), backward.pop(name, None)
    rows: list[dict[str, Any]] = []
    for direction, calls, products in (("forward", forward, 4), ("backward", backward, 10)):
        if not calls:
            continue
        operations = products * b * hq * length * length * e / (1 if what in ("plain", "softcap") else 2)
        times = interleave(
            calls, rounds=args.rounds, finish=torch.cuda.synchronize if args.device == "cuda" else lambda: None
        )
        peers = [time.best_s for name, time in times.items() if name.startswith("torch")]
        for name, time in times.items():
            rows.append({"candidate": name, "shape": shape, "what": what, "direction": direction, "best_s": time.best_s,
                         "tflop_per_s": operations / time.best_s / 1e12,
                         "ratio": min(peers) / time.best_s if peers else None})  # fmt: skip
    report(rows, shape, what)
    return rows


def sample(args: argparse.Namespace, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a graph where that can be."""
    with torch.no_grad():
        call()  # what is compiled or loaded at first use cannot be in a graph
        if args.device == "cpu":
            return call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def report(rows: list[dict[str, Any]], shape: tuple[int, ...], what: str) -> None:
    text = [[row["direction"], row["candidate"], duration(row["best_s"]), f"{row['tflop_per_s']:.0f}",
             "" if row["ratio"] is None else f"{row['ratio']:.2f}x"] for row in rows]  # fmt: skip
    print(
        f"\n{what}, "
        + "x".join(str(size) for size in shape)
        + "\n"
        + table(["", "", "time", "TFLOP/s", "against torch"], text)
    )


if __name__ == "__main__":
    main()
