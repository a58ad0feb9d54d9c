# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file with the shape of a known model and random Q4_0 weights (Q8_0 in the output head; of gpt-oss MXFP4
experts, and Q8_0 besides), and the tokenizer of another file.

    python benchmarks/llama_file.py SmolLM2-135M-Instruct.Q4_1.gguf llama-1b.gguf                              # 830 MB
    python benchmarks/llama_file.py SmolLM2-135M-Instruct.Q4_1.gguf a3b.gguf --shape qwen3-30b-a3b --layers 16  # 6.1 GB
    python benchmarks/llama_file.py SmolLM2-135M-Instruct.Q4_1.gguf oss.gguf --shape gpt-oss-20b --layers 6    # 4.1 GB

Tensors are made and written one by one, so that a file may be larger than memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType

WEIGHT = 0.02  # their root mean square
_BLOCK = 32  # weights, behind one float16 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    words: int
    context: int
    base: float
    epsilon: float
    tied: bool
    head_norms: bool = False
    """Whether queries and keys have a norm."""
    experts: int = 0
    used_experts: int = 0
    expert_inner: int = 0
    weights: str = "Q4_0"
    """The type of the weights that are neither experts nor the head."""
    of_experts: str = "Q4_0"
    biases: bool = False
    """Whether all products have a bias, and attention has sinks."""
    window: int = 0
    """The tokens that every second layer attends to; 0: all."""
    stretch: float = 0
    """The factor of YaRN by which the context is longer than 4096 tokens; 0: no YaRN."""
    second_norm: str = "ffn_norm"


SHAPES = {
    "llama-3.2-1b": Shape(
        architecture="llama",
        layers=16,
        hidden=2048,
        inner=8192,
        heads=32,
        kv_heads=8,
        head_dim=64,
        words=128256,
        context=8192,
        base=5e5,
        epsilon=1e-5,
        tied=True,
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe",
        layers=48,
        hidden=2048,
        inner=6144,
        heads=32,
        kv_heads=4,
        head_dim=128,
        words=151936,
        context=40960,
        base=1e6,
        epsilon=1e-6,
        tied=False,
        head_norms=True,
        experts=128,
        used_experts=8,
        expert_inner=768,
    ),
    "gpt-oss-20b": Shape(
        architecture="gpt-oss",
        layers=24,
        hidden=2880,
        inner=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        words=201088,
        context=131072,
        base=15e4,
        epsilon=1e-5,
        tied=False,
        experts=32,
        used_experts=4,
        expert_inner=2880,
        weights="Q8_0",
        of_experts="MXFP4",
        biases=True,
        window=128,
        stretch=32,
        second_norm="post_attention_norm",
    ),
}


def write(path: Path, tokenizer_of: Path, shape: Shape) -> None:
    """Write the file; words beyond those of ``tokenizer_of`` are padding."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    _write_sizes(writer, shape)
    _write_tokenizer(writer, tokenizer_of, shape.words)
    tensors = [*tensors_of(shape)]
    for name, sizes, type in tensors:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
        nbytes = prod(sizes) // elements * size
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), nbytes, GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, sizes, type in tensors:
        if type != "F32":
            values = blocks(random, prod(sizes[:-1]), sizes[-1], type)
        elif "norm" in name:
            values = np.ones(sizes, np.float32)
        else:
            values = random.normal(0, WEIGHT, sizes).astype(np.float32)
        writer.write_tensor_data(values)
    writer.close()


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the name, the shape and the type of each tensor."""
    hidden, columns, kv_columns = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.words, hidden), "Q8_0" if shape.tied else shape.weights
    for layer in range(shape.layers):
        for name, sizes in {
            "attn_q": (columns, hidden), "attn_k": (kv_columns, hidden), "attn_v": (kv_columns, hidden),
            "attn_output": (hidden, columns), **_mlp(shape),
        }.items():  # fmt: skip
            yield f"blk.{layer}.{name}.weight", sizes, shape.of_experts if len(sizes) == 3 else shape.weights
            if shape.biases:
                yield f"blk.{layer}.{name}.bias", sizes[:-1], "F32"
        if shape.experts:
            yield f"blk.{layer}.ffn_gate_inp.weight", (shape.experts, hidden), "F32"
        if shape.biases:
            yield f"blk.{layer}.ffn_gate_inp.bias", (shape.experts,), "F32"
            yield f"blk.{layer}.attn_sinks.weight", (shape.heads,), "F32"
        for name in ("attn_norm", shape.second_norm):
            yield f"blk.{layer}.{name}.weight", (hidden,), "F32"
        for name in ("attn_q_norm", "attn_k_norm") if shape.head_norms else ():
            yield f"blk.{layer}.{name}.weight", (shape.head_dim,), "F32"
    yield "output_norm.weight", (hidden,), "F32"
    if not shape.tied:
        yield "output.weight", (shape.words, hidden), "Q8_0"


def _mlp(shape: Shape) -> dict[str, tuple[int, ...]]:
    if not shape.experts:
        inner, hidden = shape.inner, shape.hidden
        return {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    first, down = (shape.expert_inner, shape.hidden), (shape.hidden, shape.expert_inner)
    names = {"ffn_gate_exps": first, "ffn_up_exps": first, "ffn_down_exps": down}
    return {name: (shape.experts, *sizes) for name, sizes in names.items()}


def blocks(random: np.random.Generator, n: int, k: int, type: str) -> np.ndarray:
    """Codes of any value, all with the scale that gives the weights their size."""
    if type == "MXFP4":  # levels of 2.93 on average, times a power of 2 in the first byte
        raw = random.integers(0, 256, (n, k // _BLOCK, 1 + _BLOCK // 2), dtype=np.uint8)
        raw[..., 0] = 127 + round(np.log2(WEIGHT / 2.93))
        return raw.reshape(n, -1)
    bits = {"Q4_0": 4, "Q8_0": 8}[type]
    scale = np.float16(WEIGHT * 12**0.5 / 2**bits)  # 2^bits uniform codes: 2^bits / sqrt(12)
    raw = random.integers(0, 256, (n, k // _BLOCK, 2 + _BLOCK * bits // 8), dtype=np.uint8)
    raw[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return raw.reshape(n, -1)


def _write_sizes(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_freq_base(shape.base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.words)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used_experts)
        writer.add_expert_feed_forward_length(shape.expert_inner)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.stretch:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.stretch)
        writer.add_rope_scaling_orig_ctx_len(4096)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer_of: Path, count: int) -> None:
    fields = gguf.GGUFReader(tokenizer_of).fields
    for name, field in fields.items():
        if name.startswith("tokenizer.ggml.") and name not in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            kind, *sub = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=sub[-1] if sub else None)
    words, types = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    missing = range(len(words), count)
    writer.add_token_list([*words, *(f"[PAD{i}]" for i in missing)])
    writer.add_token_types([*types, *([int(TokenType.UNUSED)] * len(missing))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer_of", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="the number of layers, instead of that of the model")
    options = parser.parse_args()
    chosen = SHAPES[options.shape]
    write(options.path, options.tokenizer_of, replace(chosen, layers=options.layers or chosen.layers))
