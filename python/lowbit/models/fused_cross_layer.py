# SPDX-License-Identifier: Apache-2.0
"""Decoder layers with attention to the result of an encoder, those of Whisper, BART and models like them, which run in
one call.

Keys and values of the encoder's result are computed once, by the layers' own projections, and stay in the
``cross_attention_cache`` of transformers' `EncoderDecoderCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lowbit.models.attention_probe import recorded, recording_probe
from lowbit.models.fused_attention import AttentionPiece
from lowbit.models.fused_layer import cache_of, in_one_call
from lowbit.models.fused_self_attention import FusedSelfAttention
from lowbit.models.layer_joins import OF_ENCODER
from lowbit.models.layer_pieces import LayerPieces
from lowbit.models.steps import MISSING
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, named, submodule_at

_PROBED = (3, 5)  # tokens of the decoder and of the encoder in the probe


class FusedCrossLayer(Fused):
    """A decoder layer with cross attention that runs as one call of the op `run_program`, or as a part of one.
    `lowbit.fuse` makes it in place."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return super().forward(hidden_states, *args, **kwargs)
        y = crossed((self,), self.facts, hidden_states, (kwargs | named(self, args),))
        return super().forward(hidden_states, *args, **kwargs) if y is None else y


def crossed(
    layers: Sequence[FusedCrossLayer], facts: dict[str, Any], x: Tensor, calls: Sequence[dict[str, Any]]
) -> Tensor | None:
    """Return the output of the last layer, or None if the layers must be called one by one. The arguments are those of
    `in_one_call`."""
    encoder, mask = (calls[0].get(name) for name in OF_ENCODER)
    cache = cache_of(calls[0])
    if not isinstance(encoder, Tensor) or encoder.dtype is not x.dtype or encoder.shape[0] != x.shape[0]:
        return None
    if any(call.get(OF_ENCODER[0]) is not encoder or call.get(OF_ENCODER[1]) is not mask for call in calls):
        return None
    if (mask is not None and mask.dim() != 4) or any(cache_of(call) is not cache for call in calls):
        return None
    if cache is not None and not _is_served(cache):
        return None
    attentions = [submodule_at(layer, layer.facts["cross_name"]) for layer in layers]
    if cache is not None and not all(_fits(cache, each, x) for each in attentions):
        return None
    own = None if cache is None else cache.self_attention_cache
    of_layers = [{name: call[name] for name in call.keys() - _OTHERS} | {"past_key_values": own} for call in calls]
    return in_one_call(layers, facts, x, of_layers, partial(_of_encoder, attentions, cache, encoder, mask))


_OTHERS = {*OF_ENCODER, "layer_past"}


def _is_served(cache: Any) -> bool:
    """Whether both caches are float ones in memory; `in_one_call` looks at the layers of the first."""
    if type(cache) is not EncoderDecoderCache:
        return False
    cross = cache.cross_attention_cache
    return type(cross) is DynamicCache and not cross.offloading


def _fits(cache: EncoderDecoderCache, attention: AttentionPiece, x: Tensor) -> bool:
    """Whether the keys and values that the cache holds for this attention, if any, are those of a batch like x."""
    if not cache.is_updated.get(attention.layer_idx):
        return True
    held = cache.cross_attention_cache.layers[attention.layer_idx]
    return all(states.shape[0] == x.shape[0] and states.dtype is x.dtype for states in (held.keys, held.values))


def _of_encoder(
    attentions: Sequence[AttentionPiece], cache: EncoderDecoderCache | None, encoder: Tensor, mask: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return the keys and values ``[B, H, S, E]`` of each cross attention, computed where the cache has none, and the
    mask."""
    states = chain.from_iterable(_cross_states(each, cache, encoder) for each in attentions)
    return list(states), MISSING if mask is None else mask


def _cross_states(
    attention: AttentionPiece, cache: EncoderDecoderCache | None, encoder: Tensor
) -> tuple[Tensor, Tensor]:
    index = attention.layer_idx
    if cache is not None and cache.is_updated.get(index):
        held = cache.cross_attention_cache.layers[index]
        return held.keys, held.values
    projections = [attention._modules[name] for name in attention.facts["projections"][1:]]
    heads = (*encoder.shape[:2], -1, attention.facts["head_dim"])
    keys, values = (projection(encoder).view(heads).transpose(1, 2) for projection in projections)
    if cache is not None:
        keys, values = cache.cross_attention_cache.update(keys, values, index)
        cache.is_updated[index] = True
    return keys, values


def may_be_cross_layer(name: str, module: nn.Module) -> bool:
    """Whether the module may be such a layer: an entry of a list, with two attentions, of which one is causal."""
    attentions = [part for part in module.modules() if isinstance(part, FusedSelfAttention)]
    return name.rpartition(".")[2].isdigit() and sorted(bool(each.is_causal) for each in attentions) == [False, True]


def fuse_cross_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose submodules are already fused, or return the reason why it stays unchanged.

    A probe call, in which each piece returns a random tensor, shows how the layer connects them. Another one of its
    cross attention shows that this keeps keys and values in the cache.
    """
    found = LayerPieces(module)
    problem = found.problem(attentions=2)
    if problem:
        return problem
    joins = found.joins(crosses=True)
    crossing = [] if joins is None else [piece.name for piece in joins.pieces if piece.crosses]
    if len(crossing) != 1 or found.pieces[crossing[0]].is_causal:
        return "it does not join its pieces as a decoder layer with cross attention does"
    attentions = found.attentions()
    cross, (own,) = attentions[crossing[0]], attentions.keys() - set(crossing)
    if cross.facts["out"] is None or attentions[own].facts["out"] is None:
        return "its attention has no output layer"
    if getattr(cross, "layer_idx", None) is None or cross.layer_idx != getattr(attentions[own], "layer_idx", None):
        return "its attentions do not have one layer_idx"
    if not _keeps_cross_states(cross):
        return "its cross attention does not keep its keys and values as transformers' caches do"
    FusedCrossLayer.take(module, found.facts(joins, own) | {"cross_name": crossing[0], "windows": (None,)})
    return ""


@torch.no_grad()
def _keeps_cross_states(attention: AttentionPiece) -> bool:
    """Whether the attention computes keys and values of the first result of an encoder that it gets, and later takes
    those of the cache."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, first, second = (
        torch.randn(2, length, attention.facts["hidden"], generator=generator, device="cpu")
        for length in (_PROBED[0], _PROBED[1], _PROBED[1])
    )
    twin = recording_probe(attention)
    twin.layer_idx = 0
    cache, expected = (EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2))
    keys, values = _cross_states(twin, expected, first)
    for encoder in (first, second):
        call = {"hidden_states": x, "key_value_states": encoder, "past_key_values": cache, "attention_mask": None}
        seen = recorded(twin, call)
        if seen is None or not (seen["key"].equal(keys) and seen["value"].equal(values)):
            return False
    held = cache.cross_attention_cache.layers[0]
    return bool(cache.is_updated.get(0)) and held.keys.equal(keys) and held.values.equal(values)
