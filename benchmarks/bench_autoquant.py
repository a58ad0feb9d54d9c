# SPDX-License-Identifier: Apache-2.0
"""autoquant against every single format: time of the whole model, its SQNR to the float model, bytes of its weights.

    python benchmarks/bench_autoquant.py                  # all-MiniLM-L6-v2, batch 32; a block of Llama-3.2-1B's shape
    python benchmarks/bench_autoquant.py --min-sqnr 15

Interleaved rounds, best of each. The plan should be as fast as the best single format that holds the bound, within 3 %.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import describe, duration, header, interleave, options, save, table
from torch import nn

import lowbit
from lowbit.autotune.candidates import default_candidates
from lowbit.autotune.options import sqnr_db


def minilm() -> tuple[nn.Module, dict[str, Any]]:
    """The model and 32 sentences of examples/01_quantize_a_model.py."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    example = __import__("01_quantize_a_model")
    tokenizer = example.AutoTokenizer.from_pretrained(example.get_model_path())
    model = example.AutoModel.from_pretrained(example.get_model_path(), dtype=torch.float32).eval()
    return model, dict(tokenizer(example.SENTENCES, padding=True, return_tensors="pt"))


def llama_block(tokens: int) -> tuple[nn.Module, dict[str, Any]]:
    """One decoder layer of the Llama-3.2-1B shape with random weights."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaModel(config).eval(), {"input_ids": torch.randint(0, 64, (1, tokens)), "use_cache": False}


MODELS = {
    "MiniLM batch 32": minilm,
    "Llama block, 512 tokens": functools.partial(llama_block, 512),
    "Llama block, 1 token": functools.partial(llama_block, 1),
}


def tokens(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The model's outputs for each token, without padding."""
    hidden = model(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()] if "attention_mask" in inputs else hidden.flatten(0, 1)


def linear_bytes(model: nn.Module) -> int:
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))


@torch.inference_mode()
def compare(make: Callable[[], tuple[nn.Module, dict[str, Any]]], args: argparse.Namespace) -> tuple[Any, list[dict]]:
    model, inputs = make()
    start = time.perf_counter()
    plan = lowbit.autoquant(model, inputs, min_sqnr=args.min_sqnr, cache=False)
    took = time.perf_counter() - start
    models = {"torch float": model}
    for config in default_candidates():
        models[str(config)] = copy.deepcopy(model)
        lowbit.quantize_(models[str(config)], config)
    models["autoquant"] = copy.deepcopy(model)
    plan.apply(models["autoquant"])
    times = interleave({name: functools.partial(it, **inputs) for name, it in models.items()}, rounds=args.rounds)
    wanted = tokens(model, inputs)
    results = [
        {
            "candidate": name,
            "best_s": times[name].best_s,
            "ratio": times["torch float"].best_s / times[name].best_s,
            "sqnr_db": sqnr_db(wanted, tokens(it, inputs)),
            "bytes": linear_bytes(it),
        }
        for name, it in models.items()
    ]
    return (plan, took), results


def cells(it: dict[str, Any]) -> list[str]:
    times = [duration(it["best_s"]), f"{it['ratio']:.2f}x"]
    return [it["candidate"], *times, f"{it['sqnr_db']:.1f}", f"{it['bytes'] / 1e6:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--min-sqnr", type=float, default=20.0)
    parser.add_argument("--plan", action="store_true", help="print the plans too")
    args = options(parser, rounds=15)
    warnings.simplefilter("ignore")
    head, every = header(), {}
    print(describe(head), "\n")
    for name in args.models:
        (plan, took), results = compare(MODELS[name], args)
        holding = [it for it in results[:-1] if it["sqnr_db"] >= args.min_sqnr]
        best = min(holding, key=lambda it: it["best_s"])
        print(f"{name}, {args.threads} threads, bound {args.min_sqnr:g} dB; autoquant took {took:.1f} s")
        rows = [cells(it) for it in sorted(results, key=lambda it: it["best_s"])]
        print(table([name, "time", "to torch float", "dB", "MB of linear weights"], rows))
        ratio = best["best_s"] / results[-1]["best_s"]
        print(f"autoquant: {ratio:.3f} times as fast as {best['candidate']}, the best single format in the bound\n")
        if args.plan:
            print(plan, "\n")
        every[name] = results
    if args.out:
        save(args.out, head, every)


if __name__ == "__main__":
    main()
