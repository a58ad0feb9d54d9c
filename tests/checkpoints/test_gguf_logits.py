# SPDX-License-Identifier: Apache-2.0
"""Logits of small random files beside llama.cpp's, for every architecture and scaling, at positions 0, 4000 and 20000.

LOWBIT_LLAMA_PYTHON names an interpreter with llama-cpp-python. `test_gguf_metadata.py` holds the angles without it.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf_beside_llama import off_by
from gguf_files import CONFIGS, gguf, write
from test_gguf_metadata import both, divisors_of_llama3, every_second, frequencies, linear, longrope, yarn


def nothing(writer: gguf.GGUFWriter) -> None:
    """No other keys."""


POSITIONS = (0, 4000, 20000)
SCALINGS = {"none": lambda writer: writer.add_rope_freq_base(30000.0), "linear": linear, "yarn": yarn, "longrope": longrope, "divisors": frequencies, "llama 3": lambda writer: writer.add_tensor("rope_freqs.weight", divisors_of_llama3(8.0, 10000.0))}
CASES = [(name, "none") for name in CONFIGS if name not in ("tied", "gpt2")]
CASES += [(name, scaling) for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "starcoder2", "stablelm", "nemotron") for scaling in ("linear", "yarn")]
CASES += [("llama", "llama 3"), ("llama", "divisors"), ("llama", "longrope"), ("phi3", "linear"), ("phi3", "longrope"), ("gpt2", "none")]


def small(name: str):
    """One head of 64 columns, two layers; scores whose softmax is neither flat nor one word."""
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=20480, pad_token_id=0)
    if name == "gpt2":
        return type(CONFIGS[name])(vocab_size=64, n_embd=64, n_layer=2, n_head=1, n_positions=20480)
    return type(CONFIGS[name])(**sizes, **({} if name in ("phi3", "starcoder2", "stablelm") else dict(head_dim=64)))


@pytest.mark.parametrize(("name", "scaling"), CASES)
def test_logits_are_those_of_llama_cpp(name, scaling, tmp_path):
    more = both(SCALINGS[scaling], every_second) if name == "gemma3" else SCALINGS[scaling]
    more = nothing if name == "gpt2" else more
    path = write(tmp_path / "model.gguf", name, "F32", config=small(name), words=True, more=more, spread=0.2)
    off = off_by(path, np.random.default_rng(0).integers(0, 64, 20001), POSITIONS)
    print(f"\n{name}, {scaling}: " + ", ".join(f"{value:.1e}" for value in off))
    assert max(off) < 2e-3  # without its key the least of these scalings is off by 0.04 at position 4000


HEADS = dict(vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, pad_token_id=0)
VARIANTS = {
    "llama": ("llama", dict(head_dim=64), nothing),
    "llama with biases": ("llama", dict(head_dim=64, attention_bias=True, mlp_bias=True), nothing),
    "qwen3 with narrow heads": ("qwen3", dict(head_dim=32), nothing),
    "gemma2 with a window": ("gemma2", dict(head_dim=32, sliding_window=100), nothing),
    "gemma2 with caps": ("gemma2", dict(head_dim=32), lambda writer: (writer.add_final_logit_softcapping(5.0), writer.add_attn_logit_softcapping(3.0))),
    "gemma3 with a window": ("gemma3", dict(head_dim=32, sliding_window=100), every_second),
    "gemma3 without a window": ("gemma3", dict(head_dim=32, sliding_window=None), nothing),
    "gemma3 with a cap": ("gemma3", dict(head_dim=32), lambda writer: writer.add_final_logit_softcapping(5.0)),
    "stablelm with biases": ("stablelm", dict(use_qkv_bias=True), nothing),
    "stablelm in parallel": ("stablelm", dict(use_parallel_residual=True), nothing),
    "stablelm, 32 columns rotated": ("stablelm", {}, lambda writer: writer.add_rope_dimension_count(32)),
    "phi3, 48 columns rotated": ("phi3", {}, lambda writer: writer.add_rope_dimension_count(48)),
    "phi3, a short text of longrope": ("phi3", {}, longrope),
    "nemotron, 24 columns rotated": ("nemotron", dict(head_dim=64), lambda writer: writer.add_rope_dimension_count(24)),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_architectures(variant, tmp_path):
    name, options, more = VARIANTS[variant]
    path = write(tmp_path / "model.gguf", name, "F32", config=type(CONFIGS[name])(**HEADS, **options), words=True, more=more, spread=0.12)
    off = off_by(path, np.random.default_rng(0).integers(0, 64, 1500), (0, 99, 100, 300, 1499))
    print(f"\n{variant}: " + ", ".join(f"{value:.1e}" for value in off))
    assert max(off) < 1e-3
