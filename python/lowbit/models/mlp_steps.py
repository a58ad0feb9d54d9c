# SPDX-License-Identifier: Apache-2.0
"""The functions that write MLPs as steps of a program: a half of a layer, or the shared experts of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowbit.models.shared_block import FusedSharedMLP, added_to_halves
from lowbit.models.steps import Steps, Written
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_mlp import FusedMLP, scalars_of
from lowbit.quant.gated_mlp import GATED_LAYERS, FusedGatedMLP
from lowbit.quant.lora_layers import base_of, is_step
from lowbit.quant.merged import split_parts


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


def mlp_steps(steps: Steps, mlp: FusedMLP, i: int, kind: int, x: int) -> Written | None:
    """Write ``act(first(x))``, ``act(first(x)) * up(x)``, or ``act(gate) * up`` of the halves of ``first(x)``."""
    if not mlp.is_as_fused():
        return None
    facts = mlp.facts
    first, last = mlp._modules[facts["first"]], mlp._modules[facts["last"]]
    if not all(is_step(mlp._modules[facts[name]]) for name in ("first", "up", "last") if facts[name] is not None):
        return None
    if facts["scale"] is not None:
        hidden = _scaled(steps, facts, first, mlp._modules[facts["up"]], x)
    elif facts["gate"] is None:
        hidden = steps.product(first, x, activation=facts["activation"])
        if facts["up"] is not None:
            hidden = steps.product(mlp._modules[facts["up"]], x, mul=hidden)
        if facts["function"]:
            hidden = steps.program.pointwise(hidden, facts["function"], parameters=facts.get("numbers", ()))
    else:
        whole = base_of(first)
        halves = split_parts(whole, 2)
        added = added_to_halves(steps, mlp, i, x) if isinstance(mlp, FusedSharedMLP) else steps.halves(first, x)
        if halves is None or added is None:
            return None
        steps.note_linear(whole)
        steps.note_addresses([each for each in (whole.weight, whole.bias) if each is not None])
        number = facts["gate"]
        gate = steps.linear(*halves[number], whole.row_number, x, [added[number]], activation=facts["activation"])
        hidden = steps.linear(*halves[1 - number], whole.row_number, x, [added[1 - number]], mul=gate)
    steps.note_half(mlp)
    steps.note(mlp.__dict__, *facts["noted"].names)
    for name, notes, _ in facts["activations"]:
        activation = mlp._modules[name]
        steps.note_module(activation)
        steps.note(activation.__dict__, "training", *notes.names)
        steps.note(activation._parameters, *activation._parameters)
        steps.note(activation._buffers, *activation._buffers)
        for number in scalars_of(activation):
            steps.note_contents(number)
    return hidden, last


def _scaled(steps: Steps, facts: dict[str, Any], first: nn.Module, up: nn.Module, x: int) -> int:
    """Write ``factor * silu(scale * first(x)) * up(x)``: the last layer, which has no bias, multiplies by the factor."""
    program, (scale, factor) = steps.program, facts["scale"]
    gate = steps.product(first, x)
    scaled = program.scaled_add(gate, scale=scale)
    return steps.product(up, x, mul=program.scaled_add(scaled, gate=scaled, scale=factor))


MLP_STEPS: dict[type[Fused], Callable[..., Written | None]] = {
    FusedGatedMLP: gated_mlp_steps,
    FusedMLP: mlp_steps,
    FusedSharedMLP: mlp_steps,
}
"""The function that writes the steps of each class of MLP, as `HALF_STEPS`."""
