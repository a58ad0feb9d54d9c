# SPDX-License-Identifier: Apache-2.0
"""Time of a look-up in a table: QuantEmbedding beside the float nn.Embedding, bitsandbytes and torchao.

    python benchmarks/bench_embedding.py
    python benchmarks/bench_embedding.py --rows 128256 --dim 4096

The indices of a call are drawn anew from the whole table, as those of a text are: most rows come from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from harness import describe, duration, header, interleave, rotate, table
from torch import nn

import lowbit

BASELINE = "nn.Embedding float32"
OURS = {
    "lowbit int8": lowbit.int8_weight_only(),
    "lowbit int4 g32": lowbit.int4_weight_only(32),
    "lowbit int3 g32": lowbit.intx_weight_only(torch.int3, 32),
}


def is_embedding(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Embedding)


def ours(weight: torch.Tensor, config: object, tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Embedding.from_pretrained(weight.clone()), nn.Linear(weight.shape[1], weight.shape[0]))
    if tied:
        model[1].weight = model[0].weight
    taken = (nn.Embedding, nn.Linear) if tied else nn.Embedding
    lowbit.quantize_(model, config, lambda module, name: isinstance(module, taken))
    return model[0]


def theirs(weight: torch.Tensor) -> dict[str, nn.Module]:
    """The peers that can be imported."""
    rows, dim = weight.shape
    peers = {BASELINE: nn.Embedding.from_pretrained(weight),
             "nn.Embedding bfloat16": nn.Embedding.from_pretrained(weight.bfloat16())}  # fmt: skip
    try:
        import bitsandbytes

        for name, cls in (("bitsandbytes 8 bits", bitsandbytes.nn.Embedding8bit),
                          ("bitsandbytes nf4", bitsandbytes.nn.EmbeddingNF4)):  # fmt: skip
            layer = cls(rows, dim)
            layer.load_state_dict({"weight": weight})
            peers[name] = layer.to("cpu")
    except ImportError:
        pass
    try:
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

        layer = nn.Sequential(nn.Embedding.from_pretrained(weight.clone()))
        quantize_(layer, IntxWeightOnlyConfig(torch.int4, PerGroup(32)), is_embedding)
        peers["torchao Intx int4 g32"] = layer
    except ImportError:
        pass
    return peers


def calls_of(layer: nn.Module, indices: list[torch.Tensor]) -> Callable[[], object]:
    return rotate([lambda x=x: layer(x) for x in indices])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe(header()))
    weight = torch.randn(args.rows, args.dim)
    layers = theirs(weight)
    for name, config in OURS.items():
        layers[name] = ours(weight, config, tied=False)
        layers[f"{name}, tied"] = ours(weight, config, tied=True)
    lines = []
    with torch.inference_mode():
        for count in args.counts:
            indices = [torch.randint(0, args.rows, (count,)) for _ in range(64)]
            works = {}
            for name, layer in layers.items():
                try:
                    layer(indices[0])
                    works[name] = calls_of(layer, indices)
                except Exception as error:  # a peer's own: what it raises is not ours to know
                    print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            times = interleave(works, rounds=args.rounds)
            for name, timing in times.items():
                of_float = times[BASELINE].best_s / timing.best_s
                lines.append([f"{name}, {count}", duration(timing.best_s), f"{of_float:.2f}x"])
    print(f"{args.rows} x {args.dim}, {args.threads} threads, best of {args.rounds} interleaved rounds")
    print(table(["table, look-ups", "time", "float32 = 1"], lines))


if __name__ == "__main__":
    main()
