# SPDX-License-Identifier: Apache-2.0
"""A step of quantization-aware training beside one in float, and beside torchao's QAT: forward and backward of what a
1B-shaped block has, a linear layer and a gated MLP, without the optimizer, which does the same for all.

    python benchmarks/bench_qat.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from harness import Run, duration, forward_and_backward, interleave, options, table
from torch import Tensor, nn

import lowbit
from lowbit.training import QATConfig

FEATURES = 2048
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


class GatedMLP(nn.Module):
    """As in Llama-3.2-1B."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(FEATURES, 4 * FEATURES, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False)),
    "gated MLP": GatedMLP,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", default="", help="part of the names of formats")
    args = options(parser, rounds=8)
    run, results, rows = Run(), {}, {}
    for block in args.blocks.split(","):
        dense = BLOCKS[block]().to(getattr(torch, args.dtype))
        x = torch.randn(args.tokens, FEATURES).to(getattr(torch, args.dtype))
        models = {"float": dense}
        for name, (config, learned_scales) in CONFIGS.items():
            if args.only in name:
                models[name] = copy.deepcopy(dense)
                lowbit.quantize_(models[name], QATConfig(config, learned_scales=learned_scales))
        models |= {name: peer for name, peer in peers(dense).items() if args.only in name}
        calls = {name: forward_and_backward(model, x, torch.randn_like(x)) for name, model in models.items()}
        for name, timing in interleave(calls, rounds=args.rounds, warmup=1, slow_s=60).items():
            results[f"{name}, {block}"] = timing.best_s
            ratio = timing.best_s / results[f"float, {block}"]
            rows.setdefault(name, []).extend([duration(timing.best_s), f"{ratio:.2f}x"])
    print(f"{args.tokens} tokens, {args.dtype}, {args.threads} threads, best of {args.rounds} interleaved rounds")
    columns = [text for block in args.blocks.split(",") for text in (block, "of float")]
    print(table(["forward and backward", *columns], [[name, *cells] for name, cells in rows.items()]))
    run.end(args.out, results)


if __name__ == "__main__":
    main()
