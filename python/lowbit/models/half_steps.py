# SPDX-License-Identifier: Apache-2.0
"""The functions that write attention and MLP of a decoder layer as steps of a program.

A half is a module between a norm and the residual stream: attention, a recurrent layer (recurrent_steps.py) or MLP
(mlp_steps.py). Its
last linear layer adds to the stream, so the function does not write that layer. It returns the operand and the layer, for
``stream + linear(operand)``. A half of experts returns what is to be added to the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowbit.models.fused_attention import AttentionPiece, FusedAttention
from lowbit.models.fused_latent_attention import FusedLatentAttention
from lowbit.models.fused_mixture import FusedMixture, mixture_steps
from lowbit.models.fused_self_attention import FusedSelfAttention
from lowbit.models.latent_steps import latent_attention_steps
from lowbit.models.layer_memory import KeysAndValues
from lowbit.models.lowbit_attention import softcap_program
from lowbit.models.mlp_steps import MLP_STEPS
from lowbit.models.products import projected
from lowbit.models.recurrent_steps import RECURRENT_STEPS
from lowbit.models.shared_block import FusedSharedAttention, projected_with_adapters
from lowbit.models.steps import Steps, Written
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_norm import EPS
from lowbit.quant.lora_layers import base_of, is_step


def attention_steps(steps: Steps, attention: AttentionPiece, i: int, kind: int, x: int) -> Written | None:
    """Write attention, with or without a window: the mask and the cache determine which tokens are visible."""
    projections, of_heads = _layers_of(attention), attention.facts["norms"]
    if projections is None or bool(attention.is_causal) is not steps.causal:
        return None
    if not all(norm.weight.is_contiguous() for norm in of_heads):
        return None
    facts = attention.facts
    shared = isinstance(attention, FusedSharedAttention)
    if shared:
        qkv = projected_with_adapters(steps, attention, projections, i, x)
    else:
        qkv = projected(steps, facts["merged"], projections, x)
    if qkv is None:
        return None
    if attention.piece is FusedSelfAttention and not steps.causal:  # no cache, no rotary embedding, no norms
        mask, heads = Program.input(3 + 3 * kind), (facts["kv_heads"], facts["head_dim"])
        attended = steps.program.self_attention(qkv, *heads, _scale_of(facts), mask, steps.cu_seqlens)
    else:
        attended = _of_cache(steps, attention, kind, qkv, i if shared else None)
    if attended is None:
        return None
    _note_attention(steps, attention)
    for norm in of_heads:
        steps.note(norm._parameters, "weight")
        steps.note(norm.__dict__, "facts", *EPS)
        steps.note_module(norm)
    return attended, attention._modules.get(facts["out"])


def cross_attention_steps(steps: Steps, attention: AttentionPiece, i: int, x: int) -> Written | None:
    """Write attention to the keys and values of an encoder's result, which are states that no step writes."""
    projections = _layers_of(attention)
    if projections is None or attention.is_causal:
        return None
    query = steps.product(projections[0], x)
    keys, values = (Program.state(steps.cross_states + 2 * i + j) for j in range(2))
    attended = steps.program.cross_attention(query, keys, values, _scale_of(attention.facts), steps.cross_mask)
    _note_attention(steps, attention)
    return attended, attention._modules[attention.facts["out"]]


def _layers_of(attention: AttentionPiece) -> list[nn.Module] | None:
    """Return the q, k and v layers, or None if the attention cannot be steps in its current state."""
    out = attention.facts["out"]
    if attention.training or hooked(attention, (out,)):
        return None
    layers = attention.projections()
    if layers is None or not all(map(is_step, layers if out is None else (*layers, attention._modules.get(out)))):
        return None
    return layers


def _scale_of(facts: dict[str, Any]) -> float:
    scale = facts["options"].get("scaling")
    return facts.get("of_queries", 1.0) * (facts["head_dim"] ** -0.5 if scale is None else float(scale))


def _note_attention(steps: Steps, attention: AttentionPiece) -> None:
    steps.note_half(attention)
    steps.note(attention.__dict__, "is_causal", *attention.facts["noted"].names)


def _of_cache(steps: Steps, attention: AttentionPiece, kind: int, qkv: int, index: int | None) -> int | None:
    """Write the step that adds the new tokens to the keys and values of the layer, and the attention to these. Return
    None if a layer before has a rotary embedding of another form."""
    program, facts = steps.program, attention.facts
    if facts["rotates"] and not steps.takes_rotation(facts["half_rotary"]):
        return None
    cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
    if facts["of_keys"] != 1.0:
        columns = sum(base_of(layer).out_features for layer in attention.projections())
        factors = torch.ones(columns, device="cpu")
        attention.keys_in(factors.view(-1, facts["head_dim"])).fill_(facts["of_keys"])
        program.scale_columns(qkv, program.constant(factors))
    keys, values = steps.keep(KeysAndValues(facts["kv_heads"], facts["head_dim"]), kind, attention, index)
    norms = [program.constant(norm.weight) for norm in facts["norms"]]
    if norms:
        norms += (facts["norm"]["eps"], facts["norm"]["offset"])
    if not facts["rotates"]:
        cos = sin = NONE
    query = program.rope_append(qkv, cos, sin, keys, values, kind, *norms, **facts["layout"])
    softcap = facts["options"].get("softcap")
    score_mod = () if softcap is None else softcap_program(float(softcap))
    sink = _sink(steps, attention)
    attended = program.attention(
        query, keys, values, kind, _scale_of(facts), mask, steps.causal, score_mod, sink, cu_seqlens=steps.cu_seqlens
    )
    if not facts["layout"]["gated"]:
        return attended
    size = facts["head_dim"]
    return program.gated_heads(attended, qkv, size, column=size, step=2 * size)


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


HALF_STEPS: dict[type[Fused], Callable[..., Written | None]] = {
    FusedAttention: attention_steps,
    FusedLatentAttention: latent_attention_steps,
    FusedMixture: mixture_steps,
    FusedSelfAttention: attention_steps,
    FusedSharedAttention: attention_steps,
    **MLP_STEPS,
    **RECURRENT_STEPS,
}
"""The function that writes the steps of each class of fused half.

The function takes the steps, the module, the index of the layer, its kind of mask and rotary embedding, and the operand
x. It returns None if the module cannot be a step in its current state.
"""
