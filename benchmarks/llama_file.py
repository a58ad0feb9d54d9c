# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file of the Llama-3.2-1B shape with random Q4_0 weights (Q8_0 in the tied table), and the tokenizer of
another file.

    python benchmarks/llama_file.py SmolLM2-135M-Instruct.Q4_1.gguf llama-1b.gguf        # 830 MB
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WORDS, CONTEXT = 16, 2048, 8192, 32, 8, 128256, 8192
WEIGHT = 0.02  # their root mean square
_BLOCK = 32  # weights, behind one float16 scale


def write(path: Path, tokenizer_of: Path) -> None:
    """Write the file; words beyond those of ``tokenizer_of`` are padding."""
    fields = gguf.GGUFReader(tokenizer_of).fields
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(WORDS)
    for name, field in fields.items():
        if name.startswith("tokenizer.ggml.") and name not in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            kind, *sub = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=sub[-1] if sub else None)
    words, types = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    missing = range(len(words), WORDS)
    writer.add_token_list([*words, *(f"[PAD{i}]" for i in missing)])
    writer.add_token_types([*types, *([int(TokenType.UNUSED)] * len(missing))])

    random = np.random.default_rng(0)
    columns = HIDDEN // HEADS * KV_HEADS
    matrices = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (columns, HIDDEN), "attn_v": (columns, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip

    def add(name: str, n: int, k: int, type: str) -> None:
        writer.add_tensor(f"{name}.weight", blocks(random, n, k, type), raw_dtype=GGMLQuantizationType[type])

    add("token_embd", WORDS, HIDDEN, "Q8_0")
    for i in range(LAYERS):
        for name, (n, k) in matrices.items():
            add(f"blk.{i}.{name}", n, k, "Q4_0")
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(random: np.random.Generator, n: int, k: int, type: str) -> np.ndarray:
    """Codes of any value, all with the scale that gives the weights their size."""
    bits = {"Q4_0": 4, "Q8_0": 8}[type]
    scale = np.float16(WEIGHT * 12**0.5 / 2**bits)  # 2^bits uniform codes: 2^bits / sqrt(12)
    raw = random.integers(0, 256, (n, k // _BLOCK, 2 + _BLOCK * bits // 8), dtype=np.uint8)
    raw[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return raw.reshape(n, -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer_of", type=Path)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    write(options.path, options.tokenizer_of)
