# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a token of Llama-3.2-1B's shape, as checkpoints of others have them: lowbit and GPTQModel's kernel.

    python benchmarks/bench_checkpoint_layers.py                    # with gptqmodel 7.7.0 in the environment, or without

A whole model of GPTQModel takes minutes to load on two cores, because it compiles every layer by torch.compile; this
times its kernel for the same products instead, not compiled. The weights are random, in groups of 32 (int4) or 128 (float8), activations bfloat16, one row. The 16 layers have memory of
their own, so that every weight comes from memory. "of the memory" is the share of what a loop that only reads finds.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from harness import Run, table
from torch import nn

import lowbit
from lowbit import _C

SHAPES = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048), "gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}  # fmt: skip
"""Outputs and inputs of the linear layers of a decoder layer."""
LAYERS, MIB = 16, 1 << 20
CONFIGS = {
    "lowbit, int4 g32": lowbit.int4_weight_only(group_size=32),
    "lowbit, int4 g32, int8 activations": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "lowbit, float8 g128": lowbit.float8_weight_only(group_size=128),
}


def packed(config: object) -> nn.ModuleList:
    layer = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for n, k in SHAPES.values())
    lowbit.quantize_(layer, config, head=None)
    return layer


def of_gptqmodel() -> nn.ModuleList:
    from gptqmodel.nn_modules.qlinear.torch_aten_kernel import TorchAtenLinear

    TorchAtenLinear.validate_once()
    layer = nn.ModuleList()
    for n, k in SHAPES.values():
        one = TorchAtenLinear(
            bits=4, group_size=32, sym=True, desc_act=False, in_features=k, out_features=n, bias=False
        )
        one.qweight.random_()
        one.scales.fill_(0.01)
        one.optimized = True  # or it compiles the Python around the kernel by torch.compile, for minutes
        one.post_init()
        layer.append(one.eval())
    return layer


def token(layers: list[nn.ModuleList], inputs: dict[int, torch.Tensor]) -> None:
    for layer in layers:
        for one, (_, k) in zip(layer, SHAPES.values(), strict=True):
            one(inputs[k])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    inputs = {k: torch.randn(1, k, dtype=torch.bfloat16) for k in (2048, 8192)}
    candidates, times = {name: packed(config) for name, config in CONFIGS.items()}, {}
    try:
        candidates["GPTQModel, GPTQ_TORCH_ATEN"] = of_gptqmodel()
    except ImportError:
        print("no gptqmodel here")
    with torch.inference_mode():
        for layer in candidates.values():
            token([layer], inputs)  # GPTQModel packs at the first call
        models = {
            name: [layer, *(copy.deepcopy(layer) for _ in range(LAYERS - 1))] for name, layer in candidates.items()
        }
        run = Run()
        for _ in range(options.rounds):
            for name, layers in models.items():
                begin = time.perf_counter()
                token(layers, inputs)
                times[name] = min(times.get(name, 1e9), time.perf_counter() - begin)
            read = max(_C.read_bandwidth(256 * MIB, streams, options.threads, 3) for streams in (1, 4))
            times["read"] = max(times.get("read", 0), read)
    rows = []
    for name, layers in models.items():
        held = {id(t): t.nbytes for layer in layers for one in layer for t in (*one.parameters(), *one.buffers())}
        gigabytes = sum(held.values()) / 1e9
        share = f"{gigabytes / times[name] / times['read']:.0%}" if name in CONFIGS else ""
        rows.append([name, f"{times[name] * 1e3:.1f}", share])
    print(f"reading: {times['read']:.1f} GB/s")
    print(table(("", "ms a token", "of the memory"), rows))
    run.end(None, rows)


if __name__ == "__main__":
    main()
