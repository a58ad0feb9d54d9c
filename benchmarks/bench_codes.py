# SPDX-License-Identifier: Apache-2.0
"""The cost of a format's codes in accuracy, by how they are chosen: all-MiniLM-L6-v2, and the byte-level language
model of examples/03_train_with_8bit_adam.py.

    python benchmarks/bench_codes.py --minilm DIR       # a folder with the model's files; without it that part is left

Per method: error dB of all weights together, and what the model loses: the mean of 1 - cosine to the float model over
200 sentence embeddings; of the byte model on bytes that were held out, the rise of the loss and the divergence from the
float model, KL(float || quantized), both in nats per byte, as mean and standard deviation over trainings from several
seeds. Sentences are those of Python's own language reference; the 64 of the calibration are others.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import pydoc_data.topics
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import describe, header, table
from torch import Tensor, nn

import lowbit

ASYMMETRIC = lowbit.MappingType.ASYMMETRIC
PIECES = 64  # batches of held-out bytes


def methods(make: Callable, group_size: int) -> dict[str, tuple[object, str]]:
    """Configurations by name, and the calibration that each needs."""

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


@dataclass
class Measured:
    """A format and method on one model."""

    name: str
    weight_db: float
    seconds: float
    lost: list[float]  # what ``loss`` of measure() returns


def measure(
    model: nn.Module, batches: list, loss: Callable[[nn.Module], list[float]], group_sizes: list[int]
) -> list[Measured]:
    """One per group size and method."""
    calibration = {
        "": None,
        "importance": lowbit.calibrate(model, batches),
        "hessian": lowbit.calibrate(model, batches, hessian=True),
    }
    found = []
    for group_size in group_sizes:
        for name, (config, needs) in methods(lowbit.int4_weight_only, group_size).items():
            quantized = copy.deepcopy(model)
            start = time.perf_counter()
            lowbit.quantize_(quantized, config, calibration=calibration[needs])
            seconds = time.perf_counter() - start
            name = f"int4 g{group_size}, {name}"
            found.append(Measured(name, weight_db(model, quantized), seconds, loss(quantized)))
            print(found[-1], file=sys.stderr)
    return found


def sentences() -> list[str]:
    """Sentences of 8 to 40 words of Python's language reference, in a fixed random order."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    found = re.findall(r"[A-Z][^.!?:|\\*`=\[\]]{30,300}\.", re.sub(r"\s+", " ", text))
    kept = sorted({sentence for sentence in found if 8 <= len(sentence.split()) <= 40})
    random.Random(0).shuffle(kept)
    return kept


def minilm(folder: Path, group_sizes: list[int]) -> list[Measured]:
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
    return measure(model, calibration, lambda net: [float((1 - (embed(net) * wanted).sum(1)).mean())], group_sizes)


def byte_model(seed: int, steps: int, group_sizes: list[int]) -> list[Measured]:
    """Rise of the held-out loss, and KL(float || quantized), nats per byte, of the model trained from one seed."""
    path = Path(__file__).parents[1] / "examples" / "03_train_with_8bit_adam.py"
    spec = importlib.util.spec_from_file_location("example_03", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    torch.manual_seed(seed)
    text, model = example.library_text(), example.ByteModel(2)
    held_out, text = text[-len(text) // 20 :], text[: -len(text) // 20]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, cycle_momentum=False)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = example.loss_of(model, example.batch(text, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    pieces = [example.batch(held_out, torch.Generator().manual_seed(number)) for number in range(PIECES)]

    @torch.no_grad()
    def logarithms(net: nn.Module) -> list[Tensor]:
        return [net(piece[:, :-1]).log_softmax(-1) for piece in pieces]

    def losses(of: list[Tensor]) -> float:
        parts = [-one.gather(2, piece[:, 1:, None]).mean().item() for one, piece in zip(of, pieces, strict=True)]
        return statistics.fmean(parts)

    exact = logarithms(model.eval())
    base = losses(exact)
    print(f"byte-level model, seed {seed}: held-out loss {base:.4f} after {steps} steps")

    def lost(net: nn.Module) -> list[float]:
        found = logarithms(net)
        divergence = [(p.exp() * (p - q)).sum(2).mean().item() for p, q in zip(exact, found, strict=True)]
        return [losses(found) - base, statistics.fmean(divergence)]

    batches = [example.batch(text, generator)[:, :-1] for _ in range(4)]
    return measure(model, batches, lost, group_sizes)


def over_seeds(runs: list[list[Measured]]) -> list[list[str]]:
    """A line per method: means and standard deviations, and each mean as a part of that of absmax."""
    lines = []
    for alike in zip(*runs, strict=True):
        line = [alike[0].name, f"{statistics.fmean(one.weight_db for one in alike):.2f}"]
        plain = [run[0] for run in runs]  # absmax is the first method
        for which in range(2):
            values = [one.lost[which] for one in alike]
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            part = statistics.fmean(values) / statistics.fmean(one.lost[which] for one in plain)
            line += [f"{statistics.fmean(values):.5f} +- {spread:.5f}", f"{part:.2f}"]
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--steps", type=int, default=300, help="of the byte-level model's training")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of the byte-level model")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[32, 128])
    args = parser.parse_args()
    print(describe(header()))
    if args.minilm:
        lines = [
            [one.name, f"{one.weight_db:.2f}", f"{one.lost[0]:.4f}", f"{one.seconds:.2f}"]
            for one in minilm(args.minilm, args.group_sizes)
        ]
        print(table(["", "weight dB", "mean 1 - cosine", "s to quantize"], lines))
    for group_size in args.group_sizes:
        runs = [byte_model(seed, args.steps, [group_size]) for seed in range(args.seeds)]
        print(table(["", "weight dB", "rise of loss", "of absmax's", "KL to float", "of absmax's"], over_seeds(runs)))


if __name__ == "__main__":
    main()
