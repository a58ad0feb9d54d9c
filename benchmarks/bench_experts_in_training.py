# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward of one module of experts in training, in low precision and in float: ours, a loop of torch
over experts, and torch's grouped_mm, which transformers calls by default.

    python benchmarks/bench_experts_in_training.py
    python benchmarks/bench_experts_in_training.py --experts 16 --tokens 2048 --dtype float32
"""

from __future__ import annotations

import argparse
import copy

import torch
from harness import Call, describe, duration, header, interleave, options, table
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit.training import Int8MixedPrecisionTrainingConfig, QATConfig, convert_to_float8_training


class ByLoop(nn.Module):
    """Experts as transformers keeps them, multiplied one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.act_fn, dtype = nn.SiLU(), getattr(torch, args.dtype)
        for key, n, k in (("gate_up_proj", 2 * args.inner, args.hidden), ("down_proj", args.hidden, args.inner)):
            weight = torch.randn(args.experts, n, k, dtype=dtype) * k**-0.5
            self.register_parameter(key, nn.Parameter(weight))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            token, place = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[e].T).chunk(2, -1)
            each = (self.act_fn(gate) * up) @ self.down_proj[e].T
            y = y.index_add(0, token, (each * top_k_weights[token, place, None]).to(y.dtype))
        return y


class ByGroupedMm(ByLoop):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        order = top_k_index.flatten().argsort()
        token = order // top_k_index.shape[1]
        ends = top_k_index.flatten().bincount(minlength=len(self.down_proj)).cumsum(0).to(torch.int32)
        gate, up = functional.grouped_mm(hidden_states[token], self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        each = functional.grouped_mm(self.act_fn(gate) * up, self.down_proj.mT, offs=ends)
        each = each * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, token, each.to(hidden_states.dtype))


def models(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The float modules, and ours in each kind of training."""
    grouped = ByGroupedMm(args)
    loop = ByLoop(args)
    loop.load_state_dict(grouped.state_dict())
    made: dict[str, nn.Module] = {"torch grouped_mm": grouped, "torch loop": loop}
    for config in (
        QATConfig(lowbit.int8_dynamic_activation_int4_weight(group_size=32)),
        Int8MixedPrecisionTrainingConfig(),
    ):
        made[str(config)] = module = copy.deepcopy(loop)
        lowbit.quantize_(module, config)
    made["float8 tensorwise"] = convert_to_float8_training(copy.deepcopy(loop))
    return made


def step_of(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor, grad: Tensor) -> Call:
    inputs = x.clone().requires_grad_()

    def step() -> None:
        inputs.grad = None
        module.zero_grad()
        module(inputs, index, weights).backward(grad)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--each", type=int, default=4, help="experts a token")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = options(parser, rounds=6, threads=2)
    print(describe(header()))
    ways, lines = models(args), []
    for tokens in args.tokens:
        x, grad = (torch.randn(tokens, args.hidden, dtype=getattr(torch, args.dtype)) for _ in range(2))
        top = torch.randn(tokens, args.experts).topk(args.each)
        route = top.indices, top.values.softmax(-1)
        times = interleave({name: step_of(way, x, *route, grad) for name, way in ways.items()}, rounds=args.rounds)
        lines += [[str(tokens), name, duration(time.best_s)] for name, time in times.items()]
    print(
        f"{args.experts} experts of {args.hidden} x {args.inner}, {args.each} a token, {args.dtype}, forward and backward"
    )
    print(table(["tokens", "experts", "time"], lines))


if __name__ == "__main__":
    main()
