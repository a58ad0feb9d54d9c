# SPDX-License-Identifier: Apache-2.0
"""Self-attention without a rotary embedding: BERT's, whose output layer is another module, and that of BART, Whisper,
CLIP and ViT, which have their own. It makes one product for q, k and v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.attention_probe import agree, recorded, recording_probe
from lowbit.models.decoder_pieces import APART
from lowbit.models.fused_attention import IDLE, READ_NOW, AttentionPiece
from lowbit.ops.rope_append import HALVES
from lowbit.quant.fused import arguments_of, has_own_tensors, hooked, is_inference, named
from lowbit.quant.merged import MergedLinear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

_PROJECTIONS = (("query", "key", "value"), APART)
_OUT = ("out_proj", "o_proj")
_PROBED = 3  # number of tokens in the probe


class FusedSelfAttention(AttentionPiece):
    """A fused self-attention module. `lowbit.fuse` makes it in place. Calls with a cache, or with the result of an
    encoder, run its own code; in the program of a layer they are steps too."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        facts, attend = self.facts, ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        layers = self.plain_projections() if is_inference(hidden_states) and not self.training else None
        given = named(self, args) | kwargs
        mask = given.pop("attention_mask", None)
        others = [given.pop(name, None) for name in facts["arguments"]]  # which the module itself may read
        if layers is None or attend is None or any(other is not None and other is not False for other in others):
            return super().forward(hidden_states, *args, **kwargs)
        batch, length, _ = hidden_states.shape
        heads = facts["merged"](layers, hidden_states).view(batch, length, 3, -1, facts["head_dim"])
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if facts["of_queries"] != 1.0:
            query = query * facts["of_queries"]
        out, weights = attend(self, query, key, value, mask, dropout=0.0, **facts["options"] | given)
        out = out.reshape(batch, length, -1)
        return (out if facts["out"] is None else self._modules[facts["out"]](out)), weights


def may_be_self_attention(module: nn.Module) -> bool:
    """Whether the module may be such attention, judged by the names of its submodules and arguments."""
    projections, out = _names_of(module)
    children = {name for name, child in module._modules.items() if child is not None and type(child) not in IDLE}
    if not projections or children != {*projections, out} - {None}:
        return False
    sizes = {getattr(module._modules[name], "out_features", 0) for name in projections}
    if len(sizes) > 1 and "past_key_values" in arguments_of(module):  # grouped heads of a decoder (Nemotron-H, Jamba)
        return False
    return out is None or "position_embeddings" not in arguments_of(module)


def fuse_self_attention(module: nn.Module) -> str:
    """Fuse ``module``, for which `may_be_self_attention` holds, or return the reason why it stays unchanged.

    The module is called with random tokens before and after. The queries, keys, values and options that it passes to
    the attention function, and its result, must agree with those of the fused module.
    """
    projections, out = _names_of(module)
    problem = _problem(module, projections, out)
    if problem:
        return problem
    hidden = module._modules[projections[0]].in_features
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, _PROBED, hidden, dtype=torch.float32, device="cpu", generator=generator)
    call = {"hidden_states": x, "attention_mask": None}
    seen = recorded(recording_probe(module), call)
    if seen is None or seen["options"].keys() - {"scaling"}:
        return "it does not pass queries, keys and values alone to the attention function"
    of_queries = _factor_of_queries(module, projections[0], x, seen["query"])
    if of_queries is None:
        return "its queries are no multiple of its projection"
    facts = {
        "projections": projections, "out": out, "hidden": hidden, "merged": MergedLinear(), "sinks": None,
        "norm": None, "norms": [], "norm_names": (), "said": [], "noted": Attributes(module, without=READ_NOW),
        "kv_heads": seen["key"].shape[1], "head_dim": seen["key"].shape[-1], "options": seen["options"],
        "of_queries": of_queries, "of_keys": 1.0, "arguments": arguments_of(module), "rotates": False,
        "layout": {"rotation": HALVES, "grouped": False, "norm_behind": False, "gated": False},
    }  # fmt: skip
    FusedSelfAttention.take(probe := recording_probe(module), facts)
    if not agree(seen, recorded(probe, call)):
        return "it does not compute attention as the fused one does"
    FusedSelfAttention.take(module, facts)
    return ""


def _names_of(module: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Return the names of the projections, or an empty tuple, and that of the output layer, if it has one."""
    there = {name for name, child in module._modules.items() if child is not None}
    projections = next((names for names in _PROJECTIONS if there.issuperset(names)), ())
    return projections, next((name for name in _OUT if name in there), None)


@torch.no_grad()
def _factor_of_queries(module: nn.Module, projection: str, x: Tensor, query: Tensor) -> float | None:
    """Return the number by which the module multiplies its queries: 1, or one of its attributes (Whisper)."""
    plain = module._modules[projection](x)
    if query.dim() != 4 or plain.numel() != query.numel():
        return None
    plain = plain.view(*x.shape[:2], -1, query.shape[-1]).transpose(1, 2)
    numbers = [1.0, *(value for value in module.__dict__.values() if type(value) is float)]
    return next((number for number in numbers if query.equal(plain * number)), None)


def _problem(module: nn.Module, projections: tuple[str, ...], out: str | None) -> str:
    layers = {name: module._modules[name] for name in (*projections, *([] if out is None else [out]))}
    for name, layer in layers.items():
        if type(layer) is not QuantLinear:
            return f"its {name} is {type(layer).__name__}, no QuantLinear"
    if len({(layers[name].in_features, layers[name].out_features) for name in projections}) > 1:
        return "its queries, keys and values have different sizes"
    if has_own_tensors(module):
        return "it has parameters or buffers of its own"
    if not hasattr(module, "config"):
        return "it has no config"
    if not layers[projections[0]].weight.is_cpu:
        return "it is not on the CPU, where the kernel rows are"
    hook = hooked(module, projections)
    return f"hooks on {hook}" if hook else ""
