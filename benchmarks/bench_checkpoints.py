# SPDX-License-Identifier: Apache-2.0
"""Answers of a model that others quantized, in tokens a second: lowbit, GPTQModel and llama.cpp on the same codes.

    python benchmarks/llama_file.py SmolLM2-135M-Instruct.Q4_1.gguf llama-1b.gguf
    python benchmarks/bench_checkpoints.py llama-1b.gguf --peer-python ~/peers/bin/python --llama-python ~/llama/bin/python

The Q4_0 codes of the file are written as a folder of GPTQ, groups of 32, and as a GGUF file whose head is as float as
that of the folder; its weights, decoded, as a folder of float8 in blocks of 128 x 128. Each candidate answers a prompt
of 16 tokens in a process of its own; the processes come in turns, and the best of their rounds counts. "of the memory"
are the bytes of a token's weights over the time of a token, beside what a loop that only reads finds in the same process.
--peer-python names the interpreter of an environment with gptqmodel, --llama-python one with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BACKENDS = {
    f"gptqmodel, {name.lower()}": name
    for name in ("GPTQ_TORCH_FUSED", "GPTQ_TORCH_INT8", "GPTQ_TORCH_CPU_AVX512", "GPTQ_TORCH_ATEN")
}
"""GPTQModel's kernels for CPUs by the names that this program has for them."""
LOWBIT = {"lowbit": ("gptq", None), "lowbit, int8": ("gptq", "int8"), "lowbit, fp8 blocks": ("fp8", "float")}
"""The folder and the activations of each candidate of lowbit."""
LLAMA = "llama.cpp"
PROMPT, ANSWER, BLOCK = 16, 48, 128
MIB = 1 << 20


# ---- the files ------------------------------------------------------------------------------------------------------


def write_files(source: Path, root: Path) -> None:
    """Write the codes of a GGUF file as the folders gptq and fp8, and as model.gguf with a float head."""
    import torch

    import lowbit

    model, tokenizer = lowbit.load_gguf(source, activations="float", fuse=False)
    model.to(torch.bfloat16)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        lowbit.dequantize_(table)
    model.tie_weights()
    lowbit.save(model, root / "model.gguf", "gguf", like=source)
    lowbit.save(model, root / "gptq", "gptq")
    lowbit.dequantize_(model)
    write_fp8(model, root / "fp8")
    for folder in ("gptq", "fp8"):
        tokenizer.save_pretrained(root / folder)


def write_fp8(model: Any, folder: Path) -> None:
    """Write the linear layers as DeepSeek's and Qwen's files have them, float8 with a scale per block."""
    import torch
    from safetensors.torch import save_file

    state = {}
    for name, value in model.state_dict().items():
        if "_proj" not in name:
            state[name] = value.contiguous()
            continue
        blocks = value.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        state |= {name: codes.flatten(2, 3).flatten(0, 1).contiguous(), f"{name}_scale_inv": scale}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    model.config.save_pretrained(folder)


# ---- one candidate, in a process of its own -------------------------------------------------------------------------


def run_lowbit(folder: Path, activations: str | None) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    import lowbit
    from lowbit import _C

    begin = time.perf_counter()
    config = lowbit.LowbitConfig("checkpoint", activations=activations)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, attn_implementation="lowbit"
    )
    loading = time.perf_counter() - begin
    lowbit.fuse(model)
    found = answers(model, torch)
    weights = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    read = max(_C.read_bandwidth(256 * MIB, streams, torch.get_num_threads(), 3) for streams in (1, 4))
    return found | {"loading s": loading, "of the memory": sum(weights.values()) * found["tokens/s"] / 1e9 / read}


def run_gptqmodel(folder: Path, backend: str) -> dict[str, float]:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    begin = time.perf_counter()
    model = GPTQModel.load(str(folder), device="cpu", backend=getattr(BACKEND, backend), dtype=torch.bfloat16)
    loading = time.perf_counter() - begin
    return answers(model.model, torch) | {"loading s": loading}


def answers(model: Any, torch: Any) -> dict[str, float]:
    ids = torch.arange(PROMPT)[None] + 5
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(ids))
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, **options)
        seconds = []
        for count in (1, 1 + ANSWER):
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=count, **options)
            seconds.append(time.perf_counter() - begin)
    return {"tokens/s": ANSWER / (seconds[1] - seconds[0])}


def run_llama(path: Path, threads: int) -> dict[str, float]:
    import llama_cpp

    begin = time.perf_counter()
    model = llama_cpp.Llama(str(path), n_threads=threads, n_threads_batch=threads, n_ctx=256, verbose=False)
    loading = time.perf_counter() - begin
    model.eval(list(range(5, 5 + PROMPT)))
    begin = time.perf_counter()
    for _ in range(ANSWER):
        model.eval([model.sample(temp=0.0)])
    return {"tokens/s": ANSWER / (time.perf_counter() - begin), "loading s": loading}


def run(candidate: str, root: Path, threads: int) -> dict[str, float]:
    if candidate == LLAMA:
        return run_llama(root / "model.gguf", threads)
    import torch

    torch.set_num_threads(threads)
    if candidate in BACKENDS:
        return run_gptqmodel(root / "gptq", BACKENDS[candidate])
    folder, activations = LOWBIT[candidate]
    return run_lowbit(root / folder, activations)


# ---- all of them ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file of Q4_0 weights, such as llama_file.py makes")
    parser.add_argument("--only", default=None, help="candidates, separated by semicolons")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="an interpreter with gptqmodel")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--folder", type=Path, help="where the files are made, and kept; default: a temporary folder")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the candidate that this process is
    given = parser.parse_args()
    if given.run:
        print(json.dumps(run(given.run, given.folder, given.threads)))
        return
    pythons = dict.fromkeys(LOWBIT, sys.executable) | dict.fromkeys(BACKENDS, given.peer_python) | {LLAMA: given.llama_python}
    wanted = given.only.split(";") if given.only else [name for name, python in pythons.items() if python]
    if unknown := [name for name in wanted if not pythons.get(name)]:
        raise SystemExit(f"bench_checkpoints: no interpreter for {unknown}, of {list(pythons)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = given.folder or Path(temporary)
        root.mkdir(exist_ok=True)
        if not (root / "fp8").exists():
            write_files(given.file, root)
        found: dict[str, dict[str, float]] = {}
        for _ in range(given.rounds):
            for name in wanted:
                keep_best(found.setdefault(name, {}), in_process(pythons[name], name, root, given))
    from harness import describe, header

    print(describe(header()))
    print(f"{'':24} {'tokens/s':>8} {'of the memory':>14} {'loading s':>10}")
    for name, row in found.items():
        print(f"{name:24} {row['tokens/s']:8.1f} {row.get('of the memory', math.nan):14.0%} {row['loading s']:10.1f}")


def in_process(python: str, name: str, root: Path, given: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, str(given.file), "--folder", str(root), "--threads", str(given.threads), "--run", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_checkpoints: {name} failed\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def keep_best(kept: dict[str, float], new: dict[str, float]) -> None:
    for key, value in new.items():
        choose = min if key == "loading s" else max
        kept[key] = choose(kept.get(key, value), value)


if __name__ == "__main__":
    main()
