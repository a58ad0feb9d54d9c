# SPDX-License-Identifier: Apache-2.0
"""Small hybrids whose caches can be cropped, and what is asked of them."""

from __future__ import annotations

import torch
from gguf_hybrids import CONFIGS as HYBRIDS
from gguf_hybrids import model_of
from gguf_qwen35 import CONFIGS as QWEN35

import lowbit
from lowbit.models.croppable_states import CroppableStates

CONFIGS = {
    "gated delta net": QWEN35["qwen35"],
    "Mamba-2": HYBRIDS["granitehybrid"],
    "Mamba-2 alone": HYBRIDS["mamba2"],
    "Mamba-1": HYBRIDS["mamba"],
    "short convolution": HYBRIDS["lfm2"],
    "projections by head": HYBRIDS["qwen3next"],
    "side by side": HYBRIDS["falcon-h1 without norm"],
    "halves": HYBRIDS["nemotron_h"],
}
ASKED = dict(do_sample=False, eos_token_id=-1, pad_token_id=0)
PROMPT = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 3)


def fused(name: str, packed: bool = True) -> torch.nn.Module:
    model = model_of(name, CONFIGS[name])
    model.set_attn_implementation("lowbit")
    if packed:
        lowbit.quantize_(model, lowbit.int8_weight_only(group_size=32))
    lowbit.fuse(model)
    return model


def logits(model: torch.nn.Module, tokens: torch.Tensor, cache=None) -> torch.Tensor:
    name = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    with torch.no_grad():
        return model(tokens, **{name: cache}, use_cache=cache is not None).logits


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours - wanted).norm() / wanted.norm()).item()


def recurrent(cache) -> list[CroppableStates]:
    return [layer for layer in cache.layers if isinstance(layer, CroppableStates)]
