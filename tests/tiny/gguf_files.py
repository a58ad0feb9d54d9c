# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small models with random weights, made by the gguf package, with the keys that llama.cpp's converter
writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map  # noqa: E402

TOKENS = torch.arange(18).view(2, 9)
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
"""By name."""
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Where the float16 numbers of a block are."""


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours - wanted).norm() / wanted.norm()).item()


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


def write(path: Path, name: str, type: str = "Q4_0", *, seed: int = 0, embedding: str | None = None, config: transformers.PreTrainedConfig | None = None, words: bool = False, spread: float = 0.1, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """A file of the model of this name whose matrices are all of ``type``, the table of words of ``embedding``; of
    another configuration, if one is given; with ``words`` that its tokenizer can cut a text into; float32 matrices of
    this ``spread``; ``more`` writes what else is in it, and takes the place of a key that is there."""
    config = config or CONFIGS[name]
    architecture = {"tied": "llama"}.get(name, name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    writer, random = gguf.GGUFWriter(path, architecture), np.random.default_rng(seed)
    _write_config(writer, config, architecture)
    _write_words(writer, config, words)
    with _keys_replaced(writer):
        more(writer)
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
            writer.add_tensor(to, random.normal(1 if "norm" in to else 0, 0.1 if len(shape) == 1 else spread, shape).astype(np.float32))
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


@contextmanager
def _keys_replaced(writer: gguf.GGUFWriter) -> Iterator[None]:
    """The writer refuses a key that it has."""
    before = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    yield
    writer.kv_data[0] = before | writer.kv_data[0]


def _write_config(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings), writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers), writer.add_head_count(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    epsilons = [getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")]
    (writer.add_layer_norm_eps if epsilons[0] is None else writer.add_layer_norm_rms_eps)(next(filter(None, epsilons)))
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        return
    writer.add_feed_forward_length(config.intermediate_size), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size), writer.add_key_length(head_dim), writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"]), writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_words(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, can_cut: bool) -> None:
    names = [f"<{number}>" for number in range(config.vocab_size)]
    if can_cut:
        names[1:9] = "a", "b", "c", "ab", "abc", "\u0120", "\u0120a", "<|end|>"
        writer.add_token_merges(["a b", "ab c", "\u0120 a"])
        writer.add_token_types([gguf.TokenType.CONTROL if name == "<|end|>" else gguf.TokenType.NORMAL for name in names])
        writer.add_eos_token_id(8)
    writer.add_tokenizer_model("gpt2"), writer.add_token_list(names)
    writer.add_pad_token_id(0)
