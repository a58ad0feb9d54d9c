# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of fused attention where autograd records them: one Function for the projections, with LoRA
of peft or without, and one for the heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.ops.lora_linear import lora_linear
from lowbit.ops.rope_append import HALVES
from lowbit.ops.rotary_heads import rotary_heads
from lowbit.quant.lora_forward import trained_layers


def may_train(module: nn.Module, facts: dict[str, Any]) -> bool:
    """Whether the heads of a module are those of `rotary_heads`, without gates and sinks, and none of its modules drops
    something in training."""
    layout = facts["layout"]
    special = layout["grouped"] or layout["norm_behind"] or layout["gated"] or facts["half_rotary"] or facts["sinks"]
    of_each_head = all(norm.weight.numel() == facts["head_dim"] for norm in facts["norms"])
    drops = any(type(child) is nn.Dropout for child in module._modules.values())
    plain = facts["rotates"] and layout["rotation"] == HALVES and not special and facts["of_keys"] == 1.0
    return plain and of_each_head and not drops


def trained_heads(
    module: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return queries, keys and values of a fused module as autograd Functions make them, or None if autograd does not
    record this call, or the module's own code has to run."""
    facts = module.facts
    if not torch.is_grad_enabled() or not facts["trains_alike"] or not isinstance(position_embeddings, tuple):
        return None
    norms = tuple(norm._parameters["weight"] for norm in facts["norms"]) or None
    frozen = not any(each.requires_grad for each in (*position_embeddings, *(norms or ())))
    layers = module.projections() if frozen and position_embeddings[0].dim() == 3 else None
    trained = None if layers is None else trained_layers(layers, x)
    if trained is None:
        return None
    found = lora_linear(x, *trained)
    qkv = (found[0] if len(found) == 1 else torch.cat(found, -1)).view(*x.shape[:2], -1, facts["head_dim"])
    norm = facts["norm"] or {"eps": 0.0, "offset": 0.0}
    return rotary_heads(qkv, *position_embeddings, facts["kv_heads"], norms, norm["eps"], norm["offset"])
