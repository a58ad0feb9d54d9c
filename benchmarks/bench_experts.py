# SPDX-License-Identifier: Apache-2.0
"""Time of one layer of a mixture of experts, Qwen3-30B-A3B's: 128 experts of which a token has 8, 2048 x 768.

    python benchmarks/bench_experts.py
    python benchmarks/bench_experts.py --config "int4 32 float" --tokens 1 64 --zipf

Each call has fresh indices, and the weights lie in memory: an int4 layer has 340 MB. Beside the op: the same two
products by gather_linear, a loop in Python over packed layers (one for each expert that is hit), and bfloat16 experts
of torch, by grouped_mm and by a loop, and with --zentorch its layer of the same format. "reading" is the time to read the bytes of the experts that are hit, as
core/bandwidth reads them in the same minute.
"""

from __future__ import annotations

import argparse

import cpu_peers
import torch
from bench_gather_linear import FORMATS, packed_weights
from cpu_peers import Ops
from harness import MIB, Call, describe, duration, header, interleave, options, rotate, table
from linear_candidates import int4_codes
from torch import Tensor
from torch.nn import functional

from lowbit import _C
from lowbit.ops.experts import experts, gate_of
from lowbit.ops.gather_linear import gather_linear
from lowbit.ops.linear import linear

CALLS = 12  # fresh indices, in turns
Route = tuple[Tensor, Tensor]


def routes(args: argparse.Namespace, tokens: int) -> list[Route]:
    """Indices and router weights: experts are as likely as one another, or by Zipf's law."""
    likely = -torch.arange(1, args.experts + 1).log() if args.zipf else torch.zeros(args.experts)
    made = []
    for _ in range(CALLS):
        order = torch.randperm(args.experts)
        scores = likely[order] - torch.empty(tokens, args.experts).exponential_().log()  # Gumbel: k without repetition
        top = scores.topk(args.each)
        made.append((top.indices, top.values.softmax(-1)))
    return made


class Packed:
    """One layer in a format of ours, and three ways to run it."""

    def __init__(self, args: argparse.Namespace, config: str) -> None:
        format, group_size, x_format = FORMATS[config]
        self.each, sizes = args.each, ((2 * args.inner, args.hidden), (args.hidden, args.inner))
        self.weights = [packed_weights(args.experts, n, k, format, group_size) for n, k in sizes]
        self.op_args = [(n, k, _C.FORMATS[format], group_size, False, _C.X_FORMATS[x_format]) for n, k in sizes]

    def op(self, x: Tensor, route: Route) -> Tensor:
        return experts(x, *self.weights, *route, *self.op_args, gate_of())

    def by_gather_linear(self, x: Tensor, route: Route) -> Tensor:
        index, weights = route
        gate, up = gather_linear(x, self.weights[0], index, self.op_args[0]).chunk(2, -1)
        each = gather_linear(functional.silu(gate) * up, self.weights[1], index, self.op_args[1])
        return (each * weights[..., None].to(each.dtype)).sum(1)

    def by_loop(self, x: Tensor, route: Route) -> Tensor:
        index, weights = route
        y = torch.zeros_like(x)
        for e in index.unique().tolist():
            token, place = (index == e).nonzero(as_tuple=True)
            gate, up = linear(x[token], self.weights[0][e], self.op_args[0]).chunk(2, -1)
            each = linear(functional.silu(gate) * up, self.weights[1][e], self.op_args[1])
            y.index_add_(0, token, each * weights[token, place, None].to(each.dtype))
        return y

    def bytes_hit(self, of: list[Route]) -> float:
        hit = sum(len(index.unique()) for index, _ in of) / len(of)
        return hit * sum(weight[0].nbytes for weight in self.weights)


class Bfloat16:
    """The same by torch."""

    def __init__(self, args: argparse.Namespace) -> None:
        one = torch.randn(args.hidden, 2 * args.inner, dtype=torch.bfloat16) / args.hidden**0.5
        self.gate_up = one.expand(args.experts, -1, -1).contiguous()
        self.down = one[:, : args.inner].T.expand(args.experts, -1, -1).contiguous()

    def grouped(self, x: Tensor, route: Route) -> Tensor:
        index, weights = route
        order = index.flatten().argsort()
        token = order // index.shape[1]
        ends = index.flatten().bincount(minlength=len(self.gate_up)).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x.bfloat16()[token], self.gate_up, offs=ends).chunk(2, -1)
        each = torch._grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        y = torch.zeros(x.shape)
        return y.index_add_(0, token, each.float() * weights.flatten()[order, None])

    def by_loop(self, x: Tensor, route: Route) -> Tensor:
        index, weights = route
        x, y = x.bfloat16(), torch.zeros(x.shape)
        for e in index.unique().tolist():
            token, place = (index == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.gate_up[e]).chunk(2, -1)
            y.index_add_(0, token, ((functional.silu(gate) * up) @ self.down[e]).float() * weights[token, place, None])
        return y


class Zentorch:
    """zentorch's layer, in W4A8 in groups of 32 or in bfloat16; all experts have the weights of one."""

    CONFIGS = "int4 32 int8_group", "bfloat16 float"

    def __init__(self, ops: Ops, args: argparse.Namespace, config: str) -> None:
        self.op, self.floats = ops.zentorch_fused_moe, []
        weights, scales = [], []
        for n, k in ((2 * args.inner, args.hidden), (args.hidden, args.inner)):
            weight = torch.randn(n, k) / k**0.5
            self.floats.append(weight)
            if config == self.CONFIGS[0]:
                codes, scale = int4_codes(weight)
                weight = ops.zentorch_woq_repack_weight(codes).view(torch.int8)
                scales.append(scale.expand(args.experts, -1, -1).contiguous())
            else:
                weight = weight.bfloat16()
            weights.append(weight.expand(args.experts, -1, -1).contiguous())
        self.weights, self.scales = weights, scales or [None, None]

    def __call__(self, x: Tensor, route: Route) -> Tensor:
        index, weights = route
        y = torch.empty_like(x)
        self.op(y, x, *self.weights, None, None, weights, index.int(), False, "silu", *self.scales)
        return y

    def check(self, x: Tensor, route: Route) -> None:
        """Compare a result with that of the float weights, to be sure that the arguments are as meant."""
        gate, up = (x.float() @ self.floats[0].T).chunk(2, -1)
        wanted = (functional.silu(gate) * up) @ self.floats[1].T
        error = float((self(x, route).float() - wanted).norm() / wanted.norm())
        if not error < 0.25:  # two products of 4-bit weights
            raise RuntimeError(f"zentorch is off by {error:.2g} of the norm: its arguments are not as meant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--each", type=int, default=8, help="experts a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    parser.add_argument("--config", nargs="+", choices=FORMATS, default=["int4 32 int8_group", "bfloat16 float"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--zipf", action="store_true", help="some experts are hot")
    parser.add_argument("--without-torch", action="store_true", help="its bfloat16 takes seconds without a unit for it")
    parser.add_argument("--zentorch", help="folder of its wheel (cpu_peers.py), for activations of bfloat16")
    args = options(parser, rounds=12, threads=2)
    print(describe(header()))
    lines, zentorch = [], cpu_peers.zentorch(args.zentorch)
    names = ["experts", "gather_linear", "loop"]
    names += [] if args.without_torch else ["torch grouped_mm", "torch loop"]
    names += [] if zentorch is None else ["zentorch"]
    with torch.inference_mode():
        peer = None if args.without_torch else Bfloat16(args)
        for config in args.config:
            layer = Packed(args, config)
            served = zentorch is not None and args.dtype == "bfloat16" and config in Zentorch.CONFIGS
            another = Zentorch(zentorch, args, config) if served else None
            for tokens in args.tokens:
                x = torch.randn(tokens, args.hidden, dtype=getattr(torch, args.dtype))
                of = routes(args, tokens)
                ways = {"experts": layer.op, "gather_linear": layer.by_gather_linear, "loop": layer.by_loop}
                ways |= {} if peer is None else {"torch grouped_mm": peer.grouped, "torch loop": peer.by_loop}
                if another is not None:
                    another.check(x, of[0])
                    ways["zentorch"] = another
                calls: dict[str, Call] = {
                    name: rotate([lambda way=way, route=route: way(x, route) for route in of])  # noqa: B023
                    for name, way in ways.items()
                }
                rates = [_C.read_bandwidth(256 * MIB, streams, args.threads, 3) for streams in (1, 4)]
                times = interleave(calls, rounds=args.rounds)
                rates += [_C.read_bandwidth(256 * MIB, streams, args.threads, 3) for streams in (1, 4)]
                reading = layer.bytes_hit(of) / max(rates) / 1e9
                lines.append([config, str(tokens), f"{layer.bytes_hit(of) / 1e6:.0f} MB", duration(reading),
                              *(duration(times[name].best_s) if name in times else "" for name in names),
                              f"{times['experts'].best_s / reading:.2f}"])  # fmt: skip
    title = f"{args.experts} experts of {args.hidden} x {args.inner}, {args.each} a token, {args.dtype}"
    print(f"{title}, {'by Zipf' if args.zipf else 'uniform'}, {args.threads} threads, best of {args.rounds}")
    print(table(["format", "tokens", "experts hit", "reading", *names, "experts / reading"], lines))


if __name__ == "__main__":
    main()
