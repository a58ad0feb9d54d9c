# SPDX-License-Identifier: Apache-2.0
"""A transformers decoder with cross attention that runs all of its layers in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from lowbit.models.fused_cross_layer import FusedCrossLayer, crossed
from lowbit.models.fused_decoder import FusedStack
from lowbit.models.fused_encoder import fuse_stack, list_of_layers
from lowbit.models.fused_layer import cache_of
from lowbit.models.layer_joins import OF_ENCODER


class FusedCrossDecoder(FusedStack):
    """A decoder of fused layers with cross attention."""

    compute = staticmethod(crossed)


def list_of_cross_layers(module: nn.Module) -> str:
    """Return the name of the module's list of two or more layers, all of them fused, or an empty string."""
    return list_of_layers(module, FusedCrossLayer)


def fuse_cross_decoder(module: nn.Module) -> str:
    """Fuse ``module``, whose list of layers is already fused, or return the reason why it stays unchanged.

    Two probe calls, in which each layer returns a random tensor, show whether the module only passes the output of each
    layer to the next, with one cache and one result of an encoder.
    """
    name = list_of_cross_layers(module)
    layers = module._modules[name]._modules.values()
    if len({layer.facts["attention"].layer_idx for layer in layers}) < len(layers):
        return "two of its layers write to one layer of the cache (layer_idx)"
    return fuse_stack(module, FusedCrossDecoder, name, (_of_text,), _of_all)


def _of_all(call: dict[str, Any]) -> tuple[Any, ...] | None:
    cache, states = cache_of(call), [call.get(name) for name in OF_ENCODER]
    return (cache, *states) if isinstance(cache, EncoderDecoderCache) and isinstance(states[0], Tensor) else None


def _of_text(probe: nn.Module, x: Tensor) -> Any:
    seen = torch.ones(1, x.shape[1], dtype=torch.long, device="cpu")
    seen[0, 0] = 0  # models create no mask without padding
    return probe(inputs_embeds=x, attention_mask=seen, encoder_hidden_states=x.flip(1), use_cache=True)
