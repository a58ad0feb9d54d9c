# SPDX-License-Identifier: Apache-2.0
"""Modules of experts in plain torch, as transformers has them, what they are given, and what packed ones stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from expert_layers import ExpertsLayer
from torch import Tensor, nn

import lowbit
from lowbit import QuantExperts, testing
from lowbit.quant.kinds import weights_of
from lowbit.quant.quant_experts import EXPERTS

E, HIDDEN, INNER, TOKENS, PICKED = 5, 100, 36, 23, 3


class Experts(nn.Module):
    """As transformers has them, in plain torch: gated, or an MLP, transposed, in turns, with biases."""

    gated, turned, turns = True, False, False

    def __init__(self, *, bias: bool = False, inner: int = INNER) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated, self.num_experts = self.turned, not self.turns, E
        self.act_fn = nn.SiLU()
        first = "gate_up_proj" if self.gated else "up_proj"
        for key, n, k in ((first, inner * (1 + self.gated), HIDDEN), ("down_proj", HIDDEN, inner)):
            weight = torch.randn(E, n, k) * k**-0.5
            self.register_parameter(key, nn.Parameter(weight.mT.contiguous() if self.turned else weight))
            if bias:
                self.register_parameter(f"{key}_bias", nn.Parameter(torch.randn(E, n) / 4))

    def product(self, key: str, x: Tensor, expert: int) -> Tensor:
        weight, bias = getattr(self, key)[expert], self._parameters.get(f"{key}_bias")
        return nn.functional.linear(x, weight.T if self.turned else weight, None if bias is None else bias[expert])

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        gate, up = (hidden[..., ::2], hidden[..., 1::2]) if self.turns else hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(E):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            hidden = self.product("gate_up_proj" if self.gated else "up_proj", hidden_states[token], expert)
            hidden = self._apply_gate(hidden) if self.gated else self.act_fn(hidden)
            y = self.product("down_proj", hidden, expert) * top_k_weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


class Turned(Experts):
    turned = True


class InTurns(Experts):
    turned = turns = True


class Ungated(Experts):
    gated = False


class UngatedTurned(Ungated):
    turned = True


CLASSES = [Experts, Turned, InTurns, Ungated, UngatedTurned]


def routed(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts of each token with one that is named twice and one without tokens, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    index = torch.randint(0, E - 1, (TOKENS, PICKED), generator=generator)
    index[2] = 1
    return x, index, torch.rand(TOKENS, PICKED, generator=generator)


def made(cls: type[Experts] = Experts, **options: Any) -> Experts:
    torch.manual_seed(0)
    return cls(**options)


def decoded(experts: QuantExperts) -> nn.Module:
    """The float module with the weights that the packed ones stand for, in float64."""
    twin = copy.deepcopy(experts)
    lowbit.dequantize_(twin, torch.float32)
    return twin.double()


def layer_of(experts: QuantExperts, step: Callable[[Tensor], Tensor] | None = None) -> ExpertsLayer:
    """What packed experts compute, read from their bytes by the reference.

    Args:
        experts: the packed module.
        step: of columns of the first product in the order of the float weight; None: that of the float class.
    """
    form, decoded_weights, x_formats = experts.form, [], []
    for weight in weights_of(experts):
        spec = EXPERTS.spec_of(experts, weight)
        mapping = "asymmetric" if spec.asymmetric else "symmetric"
        of = weight.n, weight.k, spec.format, spec.group_size, mapping
        decoded_weights.append([testing.decode_weight(packed, *of) for packed in experts._parameters[weight.key]])
        x_formats.append(spec.x_format)
    bias = experts._parameters.get(f"{form.first}_bias")
    if bias is not None and form.interleaved:  # rows of the packed weight are gates, then ups
        bias = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)

    def computed(sums: Tensor) -> Tensor:
        if form.interleaved:
            sums = torch.stack(sums.chunk(2, -1), -1).flatten(-2)
        if step is not None:
            return step(sums)
        return experts.float_class._apply_gate(experts, sums) if form.gated else experts.act_fn(sums)

    down_bias = experts._parameters.get("down_proj_bias")
    given = (None if each is None else each.detach() for each in (bias, down_bias))
    return ExpertsLayer(*decoded_weights, tuple(x_formats), computed, False, *given)
