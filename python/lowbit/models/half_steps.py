# SPDX-License-Identifier: Apache-2.0
"""The functions that write attention and MLP of a decoder layer as steps of a program.

A half is a module between a norm and the residual stream: attention or MLP. Its last linear layer adds to the stream,
so the function does not write that layer. It returns the operand and the layer, for ``stream + linear(operand)``. A half
of experts returns what is to be added to the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowbit.models.fused_attention import AttentionPiece, FusedAttention
from lowbit.models.fused_mixture import FusedMixture, mixture_steps
from lowbit.models.fused_self_attention import FusedSelfAttention
from lowbit.models.gated_mlp_steps import gated_mlp_steps
from lowbit.models.lowbit_attention import softcap_program
from lowbit.models.steps import Steps, Written
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_mlp import FusedMLP, scalars_of
from lowbit.quant.fused_norm import EPS
from lowbit.quant.gated_mlp import FusedGatedMLP
from lowbit.quant.lora_layers import base_of, is_step
from lowbit.quant.merged import split_halves


def attention_steps(steps: Steps, attention: AttentionPiece, i: int, kind: int, x: int) -> Written | None:
    """Write attention, with or without a window: the mask and the cache determine which tokens are visible."""
    out = attention.facts["out"]
    projections, o_proj = attention.projections(), attention._modules.get(out)
    of_heads = attention.facts["norms"]
    if attention.training or bool(attention.is_causal) is not steps.causal:
        return None
    if projections is None or hooked(attention, (out,)):
        return None
    if not all(map(is_step, projections if out is None else (*projections, o_proj))):
        return None
    if not all(norm.weight.is_contiguous() for norm in of_heads):
        return None
    facts = attention.facts
    qkv = _projected(steps, facts["merged"], projections, x)
    scale = facts["options"].get("scaling")
    scale = facts["head_dim"] ** -0.5 if scale is None else float(scale)
    if out is None:  # BERT's: no cache, no rotary embedding, no norms
        mask = Program.input(3 + 3 * kind)
        attended = steps.program.self_attention(qkv, facts["kv_heads"], facts["head_dim"], scale, mask, steps.cu_seqlens)
    else:
        attended = _of_cache(steps, attention, i, kind, qkv, scale)
    steps.note_half(attention)
    steps.note(attention.__dict__, "is_causal", *facts["noted"].names)
    for norm in of_heads:
        steps.note(norm._parameters, "weight")
        steps.note(norm.__dict__, "facts", *EPS)
        steps.note_module(norm)
    return attended, o_proj


def _of_cache(steps: Steps, attention: AttentionPiece, i: int, kind: int, qkv: int, scale: float) -> int:
    """Write the step that adds the new tokens to the keys and values of layer i, and the attention to these."""
    program, facts = steps.program, attention.facts
    steps.has_states = True
    cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
    keys, values = Program.state(2 * i), Program.state(2 * i + 1)
    norms = [program.constant(norm.weight) for norm in facts["norms"]]
    if norms:
        norms += (facts["norm"]["eps"], facts["norm"]["offset"])
    if facts["rotates"]:
        steps.rotates = True
    else:
        cos = sin = NONE
    query = program.rope_append(qkv, cos, sin, keys, values, kind, *norms, **facts["layout"])
    softcap = facts["options"].get("softcap")
    score_mod = () if softcap is None else softcap_program(float(softcap))
    sink = _sink(steps, attention)
    return program.attention(
        query, keys, values, kind, scale, mask, steps.causal, score_mod, sink, cu_seqlens=steps.cu_seqlens
    )


def _sink(steps: Steps, attention: AttentionPiece) -> int:
    """Return the operand of the sinks, which the op takes in float32."""
    name = attention.facts["sinks"]
    if name is None:
        return NONE
    sinks = attention._parameters[name]
    steps.note(attention._parameters, name)
    if sinks.dtype is not torch.float32:
        steps.note_contents(sinks)
    return steps.program.constant(sinks.detach().float())


def _projected(steps: Steps, merged: Any, projections: list[nn.Module], x: int) -> int:
    """Write q, k and v as one product, or as three products into column ranges of one tensor."""
    linears, added = [*map(base_of, projections)], steps.adapters(projections, x)
    if merged.holds(linears):
        steps.note(merged.__dict__, "weight", "bias")
        parameters = (parameter for linear in linears for parameter in (linear.weight, linear.bias))
        steps.note_addresses([parameter for parameter in parameters if parameter is not None])
        for linear in linears:
            steps.note_linear(linear)
        return steps.linear(merged.weight, merged.bias, merged.op_args, linears[0].row_number, x, added)
    steps.merged = False
    qkv, at = steps.program.columns(x, sum(linear.out_features for linear in linears)), 0
    for linear, adapter in zip(linears, added, strict=True):
        steps.product_with(adapter, linear, x, into=qkv, first_column=at)
        at += linear.out_features
    return qkv


def mlp_steps(steps: Steps, mlp: FusedMLP, i: int, kind: int, x: int) -> Written | None:
    """Write ``act(first(x))``, or ``act(gate) * up`` of the halves of ``first(x)``."""
    if not mlp.is_as_fused():
        return None
    facts = mlp.facts
    first, last = mlp._modules[facts["first"]], mlp._modules[facts["last"]]
    if not is_step(first) or not is_step(last):
        return None
    if facts["gate"] is None:
        hidden = steps.product(first, x, activation=facts["activation"])
        if facts["function"]:
            hidden = steps.program.pointwise(hidden, facts["function"], parameters=facts.get("numbers", ()))
    else:
        whole = base_of(first)
        halves, added = split_halves(whole), steps.halves(first, x)
        if halves is None:
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


HALF_STEPS: dict[type[Fused], Callable[..., Written | None]] = {
    FusedAttention: attention_steps,
    FusedGatedMLP: gated_mlp_steps,
    FusedMixture: mixture_steps,
    FusedMLP: mlp_steps,
    FusedSelfAttention: attention_steps,
}
"""The function that writes the steps of each class of fused half.

The function takes the steps, the module, the index of the layer, its kind of mask and rotary embedding, and the operand
x. It returns None if the module cannot be a step in its current state.
"""
