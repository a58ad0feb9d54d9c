# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small models with random weights, made by the gguf package; what they should mean is what transformers
reads out of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from transformers.integrations import GGUF_CONFIG_MAPPING  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=64),
    "tied": transformers.LlamaConfig(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=128),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=64),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=64),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=256, n_layer=2, n_head=4),
    "starcoder2": transformers.Starcoder2Config(**SIZES),
    "stablelm": transformers.StableLmConfig(**SIZES),
    "nemotron": transformers.NemotronConfig(**SIZES, head_dim=64),
}
"""By name; qwen3's and gemma's heads are of the default size, as transformers' table reads none of qwen3's."""
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Where the float16 numbers of a block are."""


def random_blocks(type: str, rows: int, k: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Rows of blocks ``[rows, bytes]`` with random codes and scales that are finite."""
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    blocks = random.integers(0, 256, (rows, k // elements, size), dtype=np.uint8)
    for at in HALVES[type]:
        numbers = random.normal(0, 0.01, blocks.shape[:2]) * np.exp(spread * random.normal(size=blocks.shape[:2]))
        blocks[:, :, at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    if type == "MXFP4":
        blocks[:, :, 0] = random.integers(116, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def write(path: Path, name: str, type: str = "Q4_0", *, seed: int = 0, embedding: str | None = None, config: transformers.PreTrainedConfig | None = None, words: bool = False) -> Path:
    """A file of the model of this name whose matrices are all of ``type``, the table of words of ``embedding``; of
    another configuration, if one is given; with ``words`` that its tokenizer can cut a text into."""
    config = config or CONFIGS[name]
    architecture = {"tied": "llama"}.get(name, name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    writer, random = gguf.GGUFWriter(path, architecture), np.random.default_rng(seed)
    _write_config(writer, config, architecture)
    _write_words(writer, config, words)
    names = get_gguf_hf_weights_map(model, TensorProcessor())
    tied = set(model.all_tied_weights_keys)
    for to, of in sorted(names.items()):
        shape = tuple(model.state_dict()[of].shape)
        if of in tied:
            continue
        if architecture == "gpt2" and len(shape) == 2 and ".h." in of:
            shape = shape[::-1]
        kind = embedding or type if to.startswith("token_embd") else type
        if len(shape) == 1 or "position_embd" in to or kind == "F32":
            writer.add_tensor(to, random.normal(1 if "norm" in to else 0, 0.1, shape).astype(np.float32))
        elif kind == "F16":
            writer.add_tensor(to, random.normal(0, 0.1, shape).astype(np.float16))
        else:
            blocks = random_blocks(kind, *shape, seed=int(random.integers(1 << 30)), spread=0.2)
            writer.add_tensor(to, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, architecture: str) -> None:
    writer.add_name("tiny")
    told = config.to_dict() | {"rope_theta": 10000.0}
    for key, of in GGUF_CONFIG_MAPPING[architecture].items():
        value = told.get(of) if isinstance(of, str) else None
        if value is None:
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)


def _write_words(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, can_cut: bool) -> None:
    names = [f"<{number}>" for number in range(config.vocab_size)]
    if can_cut:
        names[1:9] = "a", "b", "c", "ab", "abc", "\u0120", "\u0120a", "<|end|>"
        writer.add_token_merges(["a b", "ab c", "\u0120 a"])
        writer.add_token_types([gguf.TokenType.CONTROL if name == "<|end|>" else gguf.TokenType.NORMAL for name in names])
        writer.add_eos_token_id(8)
    writer.add_tokenizer_model("gpt2"), writer.add_token_list(names)
    writer.add_pad_token_id(0)
