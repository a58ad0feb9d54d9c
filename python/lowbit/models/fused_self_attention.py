# SPDX-License-Identifier: Apache-2.0
"""The self-attention of BERT and models like it: query, key and value layers and the attention function, without a
rotary embedding or an output layer. It makes one product for q, k and v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.fused_attention import IDLE, READ_NOW, AttentionPiece, agree, recorded, recording_probe
from lowbit.quant.fused import has_own_tensors, hooked, is_inference
from lowbit.quant.merged import MergedLinear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

_PROJECTIONS = ("query", "key", "value")
_PROBED = 3  # number of tokens in the probe


class FusedSelfAttention(AttentionPiece):
    """A fused self-attention module of BERT. `lowbit.fuse` makes it in place."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        facts, attend = self.facts, ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        layers = self.plain_projections() if is_inference(hidden_states) and not self.training else None
        if layers is None or attend is None or past_key_values is not None:
            return super().forward(
                hidden_states, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )
        batch, length, _ = hidden_states.shape
        heads = facts["merged"](layers, hidden_states).view(batch, length, 3, -1, facts["head_dim"])
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, **facts["options"] | kwargs)
        return out.reshape(batch, length, -1), weights


def may_be_self_attention(module: nn.Module) -> bool:
    """Whether the module may be such attention, judged by the names of its submodules."""
    children = {name for name, child in module._modules.items() if child is not None and type(child) not in IDLE}
    return children == set(_PROJECTIONS)


def fuse_self_attention(module: nn.Module) -> str:
    """Fuse ``module``, for which `may_be_self_attention` holds, or return the reason why it stays unchanged.

    The module is called with random tokens before and after. The queries, keys, values and options that it passes to
    the attention function, and its result, must agree with those of the fused module.
    """
    problem = _problem(module)
    if problem:
        return problem
    hidden = module._modules[_PROJECTIONS[0]].in_features
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, _PROBED, hidden, dtype=torch.float32, device="cpu", generator=generator)
    call = {"hidden_states": x, "attention_mask": None}
    seen = recorded(recording_probe(module), call)
    if seen is None or seen["options"].keys() - {"scaling"}:
        return "it does not pass queries, keys and values alone to the attention function"
    facts = {
        "projections": _PROJECTIONS, "out": None, "hidden": hidden, "merged": MergedLinear(), "sinks": None,
        "norm": None, "norms": [], "norm_names": (), "said": [], "noted": Attributes(module, without=READ_NOW),
        "kv_heads": seen["key"].shape[1], "head_dim": seen["key"].shape[-1], "options": seen["options"],
        "rotates": False,
    }  # fmt: skip
    FusedSelfAttention.take(probe := recording_probe(module), facts)
    if not agree(seen, recorded(probe, call)):
        return "it does not compute attention as the fused one does"
    FusedSelfAttention.take(module, facts)
    return ""


def _problem(module: nn.Module) -> str:
    layers = {name: module._modules[name] for name in _PROJECTIONS}
    for name, layer in layers.items():
        if type(layer) is not QuantLinear:
            return f"its {name} is {type(layer).__name__}, no QuantLinear"
    if len({(layer.in_features, layer.out_features) for layer in layers.values()}) > 1:
        return "its queries, keys and values have different sizes"
    if has_own_tensors(module):
        return "it has parameters or buffers of its own"
    if not hasattr(module, "config"):
        return "it has no config"
    if not layers[_PROJECTIONS[0]].weight.is_cpu:
        return "it is not on the CPU, where the kernel rows are"
    hook = hooked(module, _PROJECTIONS)
    return f"hooks on {hook}" if hook else ""
