# SPDX-License-Identifier: Apache-2.0
"""RMSNorms with a gate as one op instead of eight torch ops: those behind the recurrent layers of Mamba-2, Qwen3-Next
and Kimi-Linear."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.gated_rms_norm import gated_rms_norm
from lowbit.quant.fused import Fused, is_eager, probe_of
from lowbit.quant.fused_norm import agree, eps_of
from lowbit.quant.unchanged import Attributes

_GATES = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class FusedGatedNorm(Fused):
    """An RMSNorm with a gate that is one call of the op; `lowbit.fuse` turns a module into one in place."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x, facts, weight = hidden_states, self.facts, self._parameters.get("weight")
        if (
            gate is None or weight is None or x.dtype is not weight.dtype or not is_eager(x)
            or not facts["noted"].hold(self)
        ):  # fmt: skip
            return super().forward(hidden_states, gate)
        return gated_rms_norm(x, gate, weight, **facts["options"])


@torch.no_grad()
def gated_norm_facts(module: nn.Module) -> dict[str, Any] | None:
    """Return the facts of a module that computes `gated_rms_norm`, or None.

    A copy with random weights is called with random rows, including small ones for which eps matters, and its results
    must agree with the formula in float64.
    """
    weight, eps = getattr(module, "weight", None), eps_of(module)
    lone = isinstance(weight, nn.Parameter) and len(list(module.parameters())) == 1 and not list(module.buffers())
    if not lone or eps is None or weight.dim() != 1 or not weight.is_cpu:
        return None
    n, generator = weight.numel(), torch.Generator("cpu").manual_seed(0)
    x, gate = torch.randn(2, 3, n, device="cpu", generator=generator)
    x *= torch.tensor([[1e-3], [1.0], [30.0]], device="cpu")
    probe = probe_of(module)
    probe._parameters["weight"] = nn.Parameter(torch.rand(n, device="cpu", generator=generator) + 0.5)
    try:
        y = probe(x, gate)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    for activation, gate_first, size in itertools.product(_GATES, (False, True), _group_sizes(module, n)):
        if agree(y, _formula(x.double(), gate.double(), probe.weight.double(), eps, size, activation, gate_first)):
            options = {"eps": eps, "group_size": size, "activation": activation, "gate_first": gate_first}
            return {"options": options, "noted": Attributes(module, without={"training", "facts"})}
    return None


def _group_sizes(module: nn.Module, n: int) -> list[int]:
    """Return the sizes of groups that the attributes of the module may mean."""
    size, groups = getattr(module, "group_size", None), getattr(module, "n_groups", None)
    sizes = [n, size, n // groups if isinstance(groups, int) and groups > 0 else None]
    return [size for size in dict.fromkeys(sizes) if isinstance(size, int) and size > 0 and n % size == 0]


def _formula(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, activation: str, gate_first: bool
) -> Tensor:
    factor = _GATES[activation](gate)
    groups = (x * factor if gate_first else x).unflatten(-1, (-1, size))
    y = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    return y if gate_first else y * factor
