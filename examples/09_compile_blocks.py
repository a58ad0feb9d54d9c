# SPDX-License-Identifier: Apache-2.0
"""Compile the 30 blocks of a decoder as one graph: cold start and time of a step beside eager mode and a compilation
of the whole model.

The model has the shape of SmolLM2-135M and random weights, so nothing is downloaded. A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import copy
import os
import time

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a cold start is one that finds nothing from the last one

import torch
from transformers import LlamaConfig, LlamaModel

import lowbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10, help="the best of each counts")
    parser.add_argument("--only", default="eager,regional,full")
    arguments = parser.parse_args()
    hidden = arguments.hidden
    count = hidden // 64
    kv_count = max(number for number in range(1, max(1, count // 3) + 1) if count % number == 0)
    heads = {"num_attention_heads": count, "num_key_value_heads": kv_count}
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        use_cache=False,
        **heads,
    )
    torch.manual_seed(0)
    eager = LlamaModel(config).eval()
    lowbit.quantize_(eager, lowbit.int8_dynamic_activation_int8_weight())
    tokens = torch.randint(0, 1024, (1, arguments.tokens))
    torch.compile(torch.neg)(torch.ones(3))  # what a process pays once, whatever it compiles
    models, cold = {}, {}
    with torch.inference_mode():
        wanted = eager(tokens).last_hidden_state
        for name in arguments.only.split(","):
            model = models[name] = copy.deepcopy(eager)
            if name == "regional":
                print(lowbit.compile_blocks(model, options=lowbit.compile_options()))
            elif name == "full":
                model.compile(options=lowbit.compile_options())
            begin = time.perf_counter()
            result = model(tokens).last_hidden_state
            cold[name] = time.perf_counter() - begin
            difference = (result - wanted).norm() / wanted.norm()
            print(f"{name}: first call {cold[name]:.1f} s, off eager mode by {difference:.1e}", flush=True)
        best = dict.fromkeys(models, float("inf"))
        for _ in range(arguments.rounds):  # in turns: a drift of the machine meets all alike
            for name, model in models.items():
                begin = time.perf_counter()
                model(tokens)
                best[name] = min(best[name], time.perf_counter() - begin)
    print(f"\n{arguments.layers} blocks, {arguments.tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'':10}{'cold s':>10}{'step ms':>10}")
    for name in models:
        print(f"{name:10}{cold[name]:10.1f}{1e3 * best[name]:10.2f}")


if __name__ == "__main__":
    main()
