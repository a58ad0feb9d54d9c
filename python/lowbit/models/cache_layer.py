# SPDX-License-Identifier: Apache-2.0
"""A cache of transformers as one decoder layer sees it: its own layer, whatever index it asks for.

A layer that is compiled would otherwise have its index in its graph, which no other layer could then use.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class CacheOfLayer(Cache):
    """The layer ``index`` of ``cache``, which is made where the cache makes its layers as they are needed."""

    def __init__(self, cache: Cache, index: int) -> None:
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        super().__init__(layers=[cache.layers[index]])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.layers[0].update(key_states, value_states, *args, **kwargs)


def with_cache_of_layer(kwargs: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the arguments of a decoder layer with its own part of the cache in them. One that moves its layers to
    another device, or is none of transformers, stays."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and not cache.offloading:
        return kwargs | {"past_key_values": CacheOfLayer(cache, index)}
    return kwargs
