# SPDX-License-Identifier: Apache-2.0
"""Logits of small random float32 files beside llama.cpp's, for the architectures whose tables of names are lowbit's:
mixtures of experts, latent attention and Qwen3.5. LOWBIT_LLAMA_PYTHON names an interpreter with llama-cpp-python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf_beside_llama import off_by
from gguf_files import gguf
from gguf_mixtures import CONFIGS, LATENT, write_mixture
from gguf_qwen35 import CONFIGS as OF_QWEN35
from gguf_qwen35 import write_qwen35

LENGTH = 600
POSITIONS = range(LENGTH)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.707}
LITE = LATENT | dict(q_lora_rank=None, num_hidden_layers=27, hidden_size=128, intermediate_size=128, moe_intermediate_size=64)  # llama.cpp knows models without a latent query by their layers
V2, V3 = transformers.DeepseekV2Config, transformers.DeepseekV3Config


def nothing(writer: gguf.GGUFWriter) -> None:
    """No other keys."""


def changed(name: str, **attributes) -> transformers.PreTrainedConfig:
    config = copy.deepcopy((CONFIGS | OF_QWEN35)[name])
    for key, value in attributes.items():
        setattr(config, key, value)
    return config


VARIANTS = {
    **{name: (name, config, {}, nothing) for name, config in CONFIGS.items()},
    "olmoe": ("olmoe", changed("olmoe", num_key_value_heads=4), {}, nothing),  # llama.cpp has no keys of several queries here
    "gpt-oss without YaRN": ("gpt-oss", None, {}, lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.NONE), writer.add_rope_scaling_factor(1.0))),
    "glm4moe, weights that add up to 1": ("glm4moe", changed("glm4moe", norm_topk_prob=True), {}, nothing),
    "glm4moe without norms of heads": ("glm4moe", changed("glm4moe", use_qk_norm=False, attention_bias=False, n_group=1), {}, nothing),
    "deepseek2, V3, kv_b in one tensor": ("deepseek2", None, {"split": False}, nothing),
    "deepseek2, V3 in groups": ("deepseek2", V3(**LATENT, n_group=2, topk_group=1, norm_topk_prob=True), {}, nothing),
    "deepseek2, V3 with YaRN": ("deepseek2", V3(**LATENT, n_group=3, topk_group=2, rope_parameters=YARN), {}, nothing),
    "deepseek2, V3 with YaRN, kv_b in one tensor": ("deepseek2", V3(**LATENT, n_group=3, topk_group=2, rope_parameters=YARN), {"split": False}, nothing),
    "deepseek2, V3 without a latent query": ("deepseek2", V3(**LITE, n_group=1, topk_group=1), {}, nothing),
    "deepseek2, V2": ("deepseek2", V2(**LATENT, topk_method="greedy", n_group=None, topk_group=None, routed_scaling_factor=16.0), {}, nothing),
    "deepseek2, V2 Lite with YaRN": ("deepseek2", V2(**LITE, n_group=1, topk_group=1, topk_method="greedy", rope_parameters=YARN), {}, nothing),
    "deepseek2, V2 with experts in all layers": ("deepseek2", V2(**LATENT | dict(first_k_dense_replace=0), topk_method="greedy", n_group=None, topk_group=None), {}, nothing),
}  # fmt: skip
"""The architecture, the model, options of `write_mixture`, and further keys."""


def longer(writer: gguf.GGUFWriter, more: Callable[[gguf.GGUFWriter], None], architecture: str) -> None:
    """A context that the texts fit into, with the other keys."""
    if architecture != "gpt-oss":
        writer.add_context_length(4096)
    more(writer)


def round_the_ramp(model: torch.nn.Module) -> None:
    """Round the ends of YaRN's ramp as llama.cpp does, where gpt-oss does not."""
    model.config.rope_parameters["truncate"] = True
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def compare(path: Path, what: str) -> None:
    change = round_the_ramp if what == "gpt-oss" else None
    off = off_by(path, np.random.default_rng(0).integers(0, 64, LENGTH), POSITIONS, change)
    print(f"\n{what}: median {np.median(off):.1e}, largest {max(off):.1e}")
    assert max(off) < 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixtures(variant, tmp_path):
    name, config, options, more = VARIANTS[variant]
    path = write_mixture(tmp_path / "model.gguf", name, "F32", config=config, words=True, more=lambda writer: longer(writer, more, name), **options)
    compare(path, variant)


@pytest.mark.parametrize("heads", [(2, 6), (2, 2), (4, 8)])
@pytest.mark.parametrize("name", OF_QWEN35)
def test_qwen35(name, heads, tmp_path):
    config = changed(name, linear_num_key_heads=heads[0], linear_num_value_heads=heads[1], linear_key_head_dim=64)  # llama.cpp has one size of heads
    write_qwen35(tmp_path / "model.gguf", name, config=config, words=True, more=lambda writer: writer.add_context_length(4096))
    compare(tmp_path / "model.gguf", f"{name}, {heads[0]} key and {heads[1]} value heads")
