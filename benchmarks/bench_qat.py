# SPDX-License-Identifier: Apache-2.0
"""A step of quantization-aware training beside one in float, and beside torchao's QAT: forward and backward of linear
layers of a 1B-shaped block, without the optimizer, which does the same for all.

    python benchmarks/bench_qat.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Run, duration, interleave, table
from torch import Tensor, nn

import lowbit
from lowbit.training import QATConfig

CONFIGS: dict[str, tuple[Any, bool]] = {  # with learned scales
    "W4A8 g32": (lowbit.int8_dynamic_activation_int4_weight(32), False),
    "W4A8 g32, learned scales": (lowbit.int8_dynamic_activation_int4_weight(32), True),
    "W8A8 per row": (lowbit.int8_dynamic_activation_int8_weight(), False),
    "int4 g128": (lowbit.int4_weight_only(128), False),
    "int2 g32 asymmetric": (lowbit.intx_weight_only(torch.int2, 32, mapping_type=lowbit.MappingType.ASYMMETRIC), False),
    "nf4 g64": (lowbit.nf4_weight_only(64), False),
    "float8": (lowbit.float8_weight_only(), False),
}


def peers(dense: nn.Module) -> dict[str, nn.Module]:
    """torchao's QAT of the nearest schemes, where it is installed."""
    try:
        import torchao.quantization as ao
        from torchao.quantization.qat import QATConfig as PeerConfig
    except ImportError:
        return {}
    schemes = {
        "torchao W4A8 g32": ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.granularity.PerGroup(32)),
        "torchao int4 g128": ao.IntxWeightOnlyConfig(torch.int4, ao.granularity.PerGroup(128)),
    }
    made = {}
    for name, scheme in schemes.items():
        made[name] = copy.deepcopy(dense)
        ao.quantize_(made[name], PeerConfig(scheme, step="prepare"))
    return made


def step_of(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    inputs, grad = x.clone().requires_grad_(), torch.randn(x.shape[0], layer[0].out_features, dtype=x.dtype)

    def step() -> None:
        inputs.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(inputs).backward(grad)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, nargs="+", default=[2048, 8192], help="out; 2048 go in")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="part of the names of formats")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run, results, rows = Run(), {}, {}
    for features in args.features:
        dense = nn.Sequential(nn.Linear(2048, features, bias=False, dtype=getattr(torch, args.dtype)))
        x = torch.randn(args.tokens, 2048).to(dense[0].weight.dtype)
        layers = {"float": dense}
        for name, (config, learned_scales) in CONFIGS.items():
            if args.only in name:
                layers[name] = copy.deepcopy(dense)
                lowbit.quantize_(layers[name], QATConfig(config, learned_scales=learned_scales))
        layers |= peers(dense)
        times = interleave({name: step_of(layer, x) for name, layer in layers.items()}, rounds=args.rounds)
        for name, timing in times.items():
            ratio = timing.best_s / times["float"].best_s
            rows.setdefault(name, []).extend([duration(timing.best_s), f"{ratio:.2f}x"])
            results[f"{name}, 2048 to {features}"] = [timing.best_s, ratio]
    print(f"{args.tokens} tokens, {args.dtype}, {args.threads} threads, best of {args.rounds} interleaved rounds")
    columns = [text for features in args.features for text in (f"2048 to {features}", "of float")]
    print(table(["forward and backward", *columns], [[name, *cells] for name, cells in rows.items()]))
    run.end(args.out, results)


if __name__ == "__main__":
    main()
