# SPDX-License-Identifier: Apache-2.0
"""Other engines that run a GGUF file, for bench_llm.py: llama.cpp, its fork ik_llama.cpp, and OpenVINO.

Each function runs in a process of its own and returns figures under the names of bench_llm.py. Only llama.cpp tells the
logits of every token, so that the others have no perplexity.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path

WINDOW, ANSWER = 512, 64


def run_llama(path: Path, tokens: list[int], contexts: list[int], threads: int) -> dict[str, float]:
    import llama_cpp
    import numpy as np

    begin = time.perf_counter()
    options = dict(n_threads=threads, n_threads_batch=threads, n_batch=WINDOW, verbose=False)
    size = max(WINDOW, *(context + ANSWER for context in contexts))
    model = llama_cpp.Llama(str(path), n_ctx=size, logits_all=True, **options)
    result = {"loading s": time.perf_counter() - begin}
    losses = []
    for at in range(0, len(tokens) - WINDOW + 1, WINDOW):
        model.reset()
        model.eval(tokens[at : at + WINDOW])
        scores = np.asarray(model.scores[: WINDOW - 1], np.float64)
        scores -= scores.max(1, keepdims=True)
        chosen = scores[np.arange(WINDOW - 1), tokens[at + 1 : at + WINDOW]]
        losses.append(float((np.log(np.exp(scores).sum(1)) - chosen).mean()))
    result["perplexity"] = math.exp(sum(losses) / len(losses))
    model = llama_cpp.Llama(str(path), n_ctx=size, **options)
    for context in contexts:
        prompt = (tokens * (context // len(tokens) + 1))[:context]
        for _ in range(2):
            model.reset()
            begin = time.perf_counter()
            model.eval(prompt)
            result[f"prompt {context}"] = max(
                result.get(f"prompt {context}", 0), context / (time.perf_counter() - begin)
            )
            begin = time.perf_counter()
            for _ in range(ANSWER - 1):
                model.eval([model.sample(temp=0.0)])
            result[f"answer {context}"] = max(
                result.get(f"answer {context}", 0), (ANSWER - 1) / (time.perf_counter() - begin)
            )
    return result


def run_ik(program: str, path: Path, contexts: list[int], threads: int) -> dict[str, float]:
    """ik_llama.cpp by its own llama-bench, which repacks weights as it loads and computes no samples."""
    found: dict[str, float] = {"perplexity": math.nan, "loading s": math.nan}
    lengths = [part for context in contexts for part in ("-p", str(context), "-gp", f"{context},{ANSWER}")]
    command = [
        program,
        "-m",
        str(path),
        "-t",
        str(threads),
        "-n",
        "0",
        "-r",
        "2",
        "-fa",
        "1",
        "-rtr",
        "1",
        "-o",
        "json",
    ]
    done = subprocess.run([*command, *lengths], capture_output=True, text=True, check=True)
    for test in json.loads(done.stdout):
        kind = "answer" if test["n_gen"] else "prompt"
        speed = max(1e9 * (test["n_gen"] or test["n_prompt"]) / nanoseconds for nanoseconds in test["samples_ns"])
        found[f"{kind} {test['n_prompt']}"] = speed
    return found


def run_openvino(path: Path, tokens: list[int], contexts: list[int], threads: int) -> dict[str, float]:
    """OpenVINO GenAI, which chooses int8 activations by groups, an 8-bit cache and the unit's 16 bits by itself."""
    import numpy as np
    import openvino
    import openvino_genai

    begin = time.perf_counter()
    model = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)
    result = {"perplexity": math.nan, "loading s": time.perf_counter() - begin}
    config = openvino_genai.GenerationConfig(max_new_tokens=ANSWER, ignore_eos=True, do_sample=False)
    for context in contexts:
        prompt = np.array([(tokens * (context // len(tokens) + 1))[:context]], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        for _ in range(2):
            metrics = model.generate(inputs, config).perf_metrics
            for kind, speed in (
                ("prompt", context * 1e3 / metrics.get_ttft().mean),
                ("answer", 1e3 / metrics.get_tpot().mean),
            ):
                result[f"{kind} {context}"] = max(result.get(f"{kind} {context}", 0), speed)
    return result
