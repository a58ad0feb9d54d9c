# SPDX-License-Identifier: Apache-2.0
"""Decode decoders of several architectures, fused and not, in tokens a second.

    python benchmarks/bench_decoders.py
    python benchmarks/bench_decoders.py --only olmo2,phi --tokens 32

The models have the shapes of small ones of their kind with fewer layers, random weights, int4 weights and int8
activations, and the answer of a prompt of 16 tokens. A model is fused and unfused in turns, and the best of the rounds
counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from harness import describe, header

import lowbit
from lowbit.quant.fused import unfuse

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)),
    "phi": ("Phi", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
    "olmo": ("Olmo", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16)),
    "olmo2": ("Olmo2", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16)),
    "pythia": ("GPTNeoX", dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, rope_parameters=ROPE | {"partial_rotary_factor": 0.25})),
    "pythia-410m": ("GPTNeoX", dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, rope_parameters=ROPE | {"partial_rotary_factor": 0.25})),
    "glm4": ("Glm4", dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4, head_dim=64)),
    "cohere2": ("Cohere2", dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4)),
}  # fmt: skip
"""The kind, and its configuration: Llama 3.2 1B, Phi-1.5, OLMo 1B, OLMo 2 1B, Pythia 70M and 410M, and smaller ones than there are."""


def made(name: str, layers: int) -> torch.nn.Module:
    kind, shape = SHAPES[name]
    common = dict(num_hidden_layers=layers, vocab_size=32000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, f"{kind}Config")(**common | shape)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="lowbit").eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    return model


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(16)[None] + 5, use_cache=True).logits


def seconds(model: torch.nn.Module, tokens: int) -> tuple[float, float]:
    """Of a prompt with one token, and of the same with ``tokens`` more."""
    ids = torch.arange(16)[None] + 5
    options = dict(do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids))
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=1 + tokens, **options)
    return first, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    print(describe(header()))
    print(f"{'':12} {'unfused':>8} {'fused':>8} tokens/s")
    for name in given.only.split(","):
        model, best, said = made(name, given.layers), {False: (1e9, 1e9), True: (1e9, 1e9)}, {}
        for _ in range(given.rounds):
            for fused in (False, True):
                lowbit.fuse(model) if fused else unfuse(model)
                seconds(model, 4)
                best[fused] = tuple(map(min, best[fused], seconds(model, given.tokens)))
                said[fused] = logits(model)
        speeds = [given.tokens / (best[fused][1] - best[fused][0]) for fused in (False, True)]
        apart = float((said[True] - said[False]).norm() / said[False].norm())
        print(f"{name:12} {speeds[0]:8.1f} {speeds[1]:8.1f} {speeds[1] / speeds[0]:8.2f}x, logits apart by {apart:.1e}", flush=True)


if __name__ == "__main__":
    main()
