# SPDX-License-Identifier: Apache-2.0
"""The function that writes a gated MLP as steps of a program: a half of a layer, or the shared experts of one."""

from __future__ import annotations

from lowbit.models.steps import Steps, Written
from lowbit.quant.fused import hooked
from lowbit.quant.gated_mlp import GATED_LAYERS, FusedGatedMLP
from lowbit.quant.lora_layers import is_step


def gated_mlp_steps(steps: Steps, mlp: FusedGatedMLP, i: int, kind: int, x: int) -> Written | None:
    """Write ``act(gate(x)) * up(x)``."""
    gate, up, down = layers = [mlp._modules[name] for name in GATED_LAYERS]
    activation, act_fn = mlp.activation(), mlp._modules.get("act_fn")
    if mlp.training or activation is None or hooked(mlp, (*GATED_LAYERS, "act_fn")):
        return None
    if not all(map(is_step, layers)):
        return None
    of_gate, of_up = steps.adapters((gate, up), x)
    gated = steps.product_with(of_gate, gate, x, activation=activation)
    gated = steps.product_with(of_up, up, x, mul=gated)
    steps.note_half(mlp)
    steps.note(mlp.__dict__, "act_fn")
    steps.note(getattr(mlp.facts["act_fn"], "__dict__", {}), *mlp.facts["noted"].names)
    if act_fn is not None:
        steps.note_module(act_fn)
    return gated, down
