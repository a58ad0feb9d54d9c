# SPDX-License-Identifier: Apache-2.0
"""What the codes of a format cost in accuracy, by how they are chosen: all-MiniLM-L6-v2, and the byte-level language
model of examples/03_train_with_8bit_adam.py.

    python benchmarks/bench_codes.py --minilm DIR       # a folder with the model's files; without it that part is left

Per method: error dB of all weights together, and what the model loses: the mean of 1 - cosine to the float model over
200 sentence embeddings, and the rise of the loss on bytes that were held out. Sentences are those of Python's own
language reference; the 64 of the calibration are others.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import pydoc_data.topics
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import describe, header, table
from torch import Tensor, nn

import lowbit

ASYMMETRIC = lowbit.MappingType.ASYMMETRIC


def methods(make: Callable, group_size: int) -> dict[str, tuple[object, str]]:
    """Configurations by name, and what they need of a calibration."""

    def config(**options: object) -> object:
        return make(group_size, **options)

    return {
        "absmax": (config(scale="absmax"), ""),
        "search": (config(), ""),
        "search, calibrated": (config(), "importance"),
        "GPTQ": (config(algorithm=lowbit.GPTQ()), "hessian"),
        "GPTQ, in order": (config(algorithm=lowbit.GPTQ(act_order=False)), "hessian"),
        "asymmetric absmax": (config(mapping_type=ASYMMETRIC, scale="absmax"), ""),
        "asymmetric search": (config(mapping_type=ASYMMETRIC), ""),
        "asymmetric search, calibrated": (config(mapping_type=ASYMMETRIC), "importance"),
        "asymmetric GPTQ": (config(mapping_type=ASYMMETRIC, algorithm=lowbit.GPTQ()), "hessian"),
        "HQQ": (config(algorithm=lowbit.HQQ()), ""),
    }


def weight_db(model: nn.Module, quantized: nn.Module) -> float:
    """Error dB over all weights that were quantized, whatever was minimized."""
    signal = noise = 0.0
    for name, layer in quantized.named_modules():
        if isinstance(layer, lowbit.QuantLinear):
            weight = model.get_submodule(name).weight.detach().double()
            signal += float(weight.square().sum())
            noise += float((weight - layer.dequantize().double()).square().sum())
    return 10 * math.log10(signal / noise)


def measure(
    model: nn.Module, batches: list, loss: Callable[[nn.Module], float], group_sizes: list[int]
) -> list[list[str]]:
    """A line per group size and method."""
    calibration = {
        "": None,
        "importance": lowbit.calibrate(model, batches),
        "hessian": lowbit.calibrate(model, batches, hessian=True),
    }
    lines = []
    for group_size in group_sizes:
        for name, (config, needs) in methods(lowbit.int4_weight_only, group_size).items():
            quantized = copy.deepcopy(model)
            start = time.perf_counter()
            lowbit.quantize_(quantized, config, calibration=calibration[needs])
            seconds = time.perf_counter() - start
            line = [f"int4 g{group_size}, {name}", f"{weight_db(model, quantized):.2f}", f"{loss(quantized):.4f}"]
            lines.append([*line, f"{seconds:.2f}"])
            print(" ".join(lines[-1]), file=sys.stderr)
    return lines


def sentences() -> list[str]:
    """Sentences of 8 to 40 words of Python's language reference, in a fixed random order."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    found = re.findall(r"[A-Z][^.!?:|\\*`=\[\]]{30,300}\.", re.sub(r"\s+", " ", text))
    kept = sorted({sentence for sentence in found if 8 <= len(sentence.split()) <= 40})
    random.Random(0).shuffle(kept)
    return kept


def minilm(folder: Path, group_sizes: list[int]) -> list[list[str]]:
    """Mean of 1 - cosine of 200 embeddings."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    texts = sentences()

    def batches_of(some: list[str]) -> list[dict[str, Tensor]]:
        parts = (some[at : at + 16] for at in range(0, len(some), 16))
        return [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]

    evaluated = batches_of(texts[:200])

    @torch.no_grad()
    def embed(net: nn.Module) -> Tensor:
        rows = []
        for batch in evaluated:
            mask = batch["attention_mask"][:, :, None]
            hidden = net(**batch).last_hidden_state
            rows.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)))
        return torch.cat(rows)

    wanted = embed(model)
    calibration = [dict(tokenizer(text, return_tensors="pt")) for text in texts[200:264]]
    return measure(model, calibration, lambda net: float((1 - (embed(net) * wanted).sum(1)).mean()), group_sizes)


def byte_model(steps: int, group_sizes: list[int]) -> list[list[str]]:
    """Rise of the held-out loss, nats per byte."""
    path = Path(__file__).parents[1] / "examples" / "03_train_with_8bit_adam.py"
    spec = importlib.util.spec_from_file_location("example_03", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    text, model = example.library_text(), example.ByteModel(2)
    held_out, text = text[-len(text) // 20 :], text[: -len(text) // 20]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, cycle_momentum=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = example.loss_of(model, example.batch(text, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    pieces = [example.batch(held_out, torch.Generator().manual_seed(seed)) for seed in range(64)]

    @torch.no_grad()
    def held_out_loss(net: nn.Module) -> float:
        return sum(example.loss_of(net, piece).item() for piece in pieces) / len(pieces)

    base = held_out_loss(model)
    print(f"byte-level model: held-out loss {base:.4f} after {steps} steps")
    batches = [example.batch(text, generator)[:, :-1] for _ in range(4)]
    return measure(model.eval(), batches, lambda net: held_out_loss(net) - base, group_sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--steps", type=int, default=300, help="of the byte-level model's training")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[32, 128])
    args = parser.parse_args()
    print(describe(header()))
    columns = ["", "weight dB", "", "s to quantize"]
    if args.minilm:
        columns[2] = "mean 1 - cosine"
        print(table(columns, minilm(args.minilm, args.group_sizes)))
    columns[2] = "rise of loss"
    print(table(columns, byte_model(args.steps, args.group_sizes)))


if __name__ == "__main__":
    main()
