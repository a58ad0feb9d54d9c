# SPDX-License-Identifier: Apache-2.0
"""A gated MLP as in transformers' decoders, which `fuse_gated_mlps` takes."""

from __future__ import annotations

from torch import Tensor, nn


class GatedMLP(nn.Module):
    def __init__(self, features: int = 64, hidden: int = 96, act_fn: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias) for _ in range(2))
        self.down_proj = nn.Linear(hidden, features, bias)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
