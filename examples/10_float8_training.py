# SPDX-License-Identifier: Apache-2.0
"""Loss curves of float8 training beside float32 and bfloat16: the same small language model, batches and seeds.

    python examples/10_float8_training.py                     # a minute; nothing is downloaded
    python examples/10_float8_training.py --steps 1000

A byte-level Llama learns Python's standard library. All linear layers but the head train in float8, by each recipe,
with float32 weights. Loss is in nats per byte, on text that is held out.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.training import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

CONTEXT, BATCH, WIDTH, HELD_OUT = 64, 16, 128, 64
RECIPES = [name.value for name in Float8LinearRecipeName]


def library_text() -> Tensor:
    """Return the sources of the standard library's modules as pieces, [pieces, CONTEXT] int64, in a fixed order."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    return pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]


def models(layers: int) -> dict[str, nn.Module]:
    """Return one model, as it is and in low precision."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))
    made = {"float32": dense, "bfloat16": copy.deepcopy(dense).bfloat16()}
    for recipe in RECIPES:
        config = Float8LinearConfig.from_recipe_name(recipe)
        made[recipe] = convert_to_float8_training(
            copy.deepcopy(dense), module_filter_fn=lambda module, name: name != "lm_head", config=config
        )
    return made


def losses(model: nn.Module, pieces: Tensor, steps: int, every: int) -> list[float]:
    """Train, and return the loss on held-out pieces after each ``every`` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held_out, found = pieces[:HELD_OUT], []
    for step in range(1, steps + 1):
        start = HELD_OUT + step * BATCH
        batch = pieces[start : start + BATCH]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                found.append(float(model(input_ids=held_out, labels=held_out).loss))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    pieces, every = library_text(), max(1, args.steps // 5)
    steps = min(args.steps, (len(pieces) - HELD_OUT) // BATCH - 1)
    curves = {name: losses(model, pieces, steps, every) for name, model in models(args.layers).items()}
    print("step  " + "".join(f"{name:>20}" for name in curves))
    for i, row in enumerate(zip(*curves.values(), strict=True)):
        print(f"{(i + 1) * every:<6}" + "".join(f"{loss:20.3f}" for loss in row))


if __name__ == "__main__":
    main()
