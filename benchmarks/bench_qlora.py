# SPDX-License-Identifier: Apache-2.0
"""A LoRA step of a decoder layer of a 1B model: bfloat16 and float32 base, nf4 of lowbit, nf4 of bitsandbytes.

    python benchmarks/bench_qlora.py
    python benchmarks/bench_qlora.py --tokens 128,512,2048 --rounds 5 --out qlora.json

A step is forward, backward and the optimizer: torch's fused AdamW on float bases, AdamW8bit of the same package on the
nf4 ones. Layers are those of Llama 3.2 1B with adapters of peft of rank 16 in all of them. bitsandbytes runs without
lowbit's kernels, and is left out if it is not installed. The parts below the table say what bounds a step: products of
the layers in the forward pass, the decoding of weights and products in the backward pass.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["LOWBIT_BITSANDBYTES"] = "0"

import harness
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import lowbit
from lowbit.ops.input_gradient import input_gradient

HIDDEN, WIDE, HEADS, KV_HEADS, RANK = 2048, 8192, 32, 8, 16
SHAPES = [(HIDDEN, HIDDEN)] * 2 + [(512, HIDDEN)] * 2 + [(WIDE, HIDDEN)] * 2 + [(HIDDEN, WIDE)]
NF4 = lowbit.nf4_weight_only(group_size=64)


def base(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaModel(config).to(dtype)


def of_bitsandbytes(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                layer = Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
                )
                layer.weight = Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, layer.to("cpu"))
    return model


def step_of(model: nn.Module, optimizer_class: Any, options: dict[str, Any], tokens: int) -> Callable[[], None]:
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_class(trained, lr=1e-4, **options)
    ids = torch.arange(tokens)[None] % 64

    def step() -> None:
        model(ids, use_cache=False)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(tokens: int) -> dict[str, Callable[[], None]]:
    bf16, fused, packed = torch.bfloat16, {"fused": True}, lowbit.optim.AdamW8bit
    found = {
        "bfloat16": step_of(base(bf16), torch.optim.AdamW, fused, tokens),
        "float32": step_of(base(torch.float32), torch.optim.AdamW, fused, tokens),
    }
    for name, dtype in (("nf4 lowbit", bf16), ("nf4 lowbit, float32", torch.float32)):
        model = base(dtype)
        lowbit.quantize_(model, NF4)
        found[name] = step_of(model, packed, {}, tokens)
    try:
        import bitsandbytes
    except ImportError:
        print("bitsandbytes is not installed")
    else:
        make = bitsandbytes.optim.AdamW8bit
        found["nf4 bitsandbytes"] = step_of(of_bitsandbytes(base(bf16), bf16), make, {}, tokens)
    return found


def parts(tokens: int) -> dict[str, Callable[[], None]]:
    """The products of all layers of the block alone, without adapters, in bfloat16."""
    torch.manual_seed(0)
    floats = [torch.randn(n, k).bfloat16() for n, k in SHAPES]
    layers = []
    for weight in floats:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.float()
        layers.append(lowbit.QuantLinear.from_linear(linear, NF4.spec(torch.float32)))
    inputs = [torch.randn(tokens, k).bfloat16() for _, k in SHAPES]
    outputs = [torch.randn(tokens, n).bfloat16() for n, _ in SHAPES]

    def over(function: Callable[[int], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for i in range(len(SHAPES)):
                    function(i)

        return run

    return {
        "forward, bfloat16": over(lambda i: inputs[i] @ floats[i].t()),
        "forward, nf4 lowbit": over(lambda i: layers[i](inputs[i])),
        "backward, bfloat16": over(lambda i: outputs[i] @ floats[i]),
        "backward, nf4 lowbit": over(lambda i: input_gradient(outputs[i], layers[i].weight, layers[i].op_args[:-1])),
    }


def peer_of(name: str) -> str:
    """The bfloat16 case that a case is compared with."""
    return f"{name.split(',')[0]}, bfloat16" if name.startswith(("forward", "backward")) else "bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,512")
    options = harness.options(parser, rounds=5)
    run, results = harness.Run(), {}
    for tokens in map(int, options.tokens.split(",")):
        for title, make in (("LoRA step", steps), ("products of the layers", parts)):
            times = harness.interleave(make(tokens), rounds=options.rounds, sample_s=0.0, warmup=1, slow_s=60.0)
            rows = [
                [name, harness.duration(time.best_s), f"{time.best_s / times[peer_of(name)].best_s:.2f}x"]
                for name, time in times.items()
            ]
            print(f"\n{harness.table([f'{title}, {tokens} tokens', 'best', 'of bfloat16'], rows)}", flush=True)
            results[f"{title}, {tokens}"] = {name: time.best_s for name, time in times.items()}
    run.end(options.out, results)


if __name__ == "__main__":
    main()
