# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, and folders that hold them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

LLAMA = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)),
    "tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "bf16": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA, dtype="bfloat16")),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=4)),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
}  # fmt: skip


def save(name: str, folder: Path, **options: object) -> Path:
    """The folder that holds the model of this name, in float."""
    cls, config = MODELS[name]
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config)).to(torch.bfloat16 if name == "bf16" else torch.float32)
    model.save_pretrained(folder / "float", **options)
    return folder / "float"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(14).view(2, 7)).logits
