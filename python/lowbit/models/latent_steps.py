# SPDX-License-Identifier: Apache-2.0
"""The function that writes multi-head latent attention as steps of a program, in the form of latent_states.py.

The cache is one head of keys, a latent vector c with a rotated key r beside it, whose values are the latent vectors. Two
steps write c and r of the new tokens there; two others put the queries [K_h^T q, p] together.
"""

from __future__ import annotations

from typing import Any

from lowbit.models.layer_memory import LatentVectors
from lowbit.models.steps import Steps, Written
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import hooked
from lowbit.quant.fused_norm import FusedRMSNorm
from lowbit.quant.lora_layers import is_step


def latent_attention_steps(steps: Steps, attention: Any, i: int, kind: int, x: int) -> Written | None:
    """Write latent attention."""
    facts, modules, program = attention.facts, attention._modules, steps.program
    if attention.training or facts["no_steps"] or not facts["noted"].hold(attention) or hooked(attention, modules):
        return None
    layers, norms = ([modules[name] for name in facts[of]] for of in ("layers", "norms"))
    if bool(attention.is_causal) is not steps.causal or not all(map(is_step, layers)):
        return None
    if not all(isinstance(norm, FusedRMSNorm) and steps.takes_norm(norm) for norm in norms):
        return None
    if facts["rotates"] and not steps.takes_rotation(facts["half_rotary"]):
        return None
    weights = facts["weights"].of(attention, steps.dtype)
    if weights is None:
        return None
    heads, kept, turned, _, rank = facts["sizes"]
    to_queries, to_values = ((program.constant(of.packed), of.op_args) for of in weights)
    cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
    rotary = {"cos": cos, "sin": sin, "rotation": facts["rotation"]} if facts["rotates"] else {}
    keys, values = steps.keep(LatentVectors(rank, turned), kind, attention)

    *readers, of_keys, last = layers
    made = steps.product(of_keys, x)
    program.heads(made, 1, rank, 0, rank, keys, 0, kind, **of_heads(steps, norms[-1]))
    program.heads(made, 1, turned, rank, turned, keys, rank, kind, **rotary)

    q = steps.product(readers[0], x)
    if len(readers) > 1:
        q = steps.product(readers[1], steps.norm(norms[0], q))
    queries = program.columns(q, heads * (rank + turned))
    projected = program.head_linear(program.heads(q, heads, kept, 0, kept + turned), *to_queries)
    program.heads(projected, heads, rank, 0, rank, queries)
    program.heads(q, heads, turned, kept, kept + turned, queries, rank, NONE, **rotary)
    attended = program.attention(queries, keys, values, kind, facts["scale"], mask, steps.causal)

    steps.note_half(attention)
    steps.note(attention.__dict__, "is_causal", *facts["noted"].names)
    decoded = modules[facts["decoded"]]
    steps.note_linear(decoded)
    steps.note_contents(decoded.weight)
    return program.head_linear(attended, *to_values), last


def of_heads(steps: Steps, norm: Any) -> dict[str, Any]:
    """Return a norm as arguments of a step of heads."""
    steps.note_norm(norm)
    return dict(weight=steps.program.constant(norm.weight), eps=norm.facts["eps"], offset=norm.facts["offset"])
