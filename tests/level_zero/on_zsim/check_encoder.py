# SPDX-License-Identifier: Apache-2.0
"""An encoder of MiniLM's shape, smaller and with random weights, quantized W8A8: on the device as on the CPU."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

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


@torch.no_grad()
def test_the_encoder_gives_what_it_gives_on_the_cpu() -> None:
    model, x = quantized_encoder(), torch.randn(2, TOKENS, WIDTH)
    wanted = model(x)
    model.to("lowbit_ze")
    there = model(x.to("lowbit_ze")).cpu()
    assert _C.last_kernel("linear") == ROW
    assert cosine_similarity(there.flatten(1), wanted.flatten(1)).min() >= 0.9999
