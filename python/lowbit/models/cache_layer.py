# SPDX-License-Identifier: Apache-2.0
"""A view of a transformers cache for one decoder layer: it holds that layer's entry only and ignores the index.

Otherwise the graph of a compiled layer would contain its index, and no other layer could use the same graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class CacheOfLayer(Cache):
    """The entry ``index`` of ``cache``, which is created first if the cache creates its entries on demand."""

    def __init__(self, cache: Cache, index: int) -> None:
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        super().__init__(layers=[cache.layers[index]])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.layers[0].update(key_states, value_states, *args, **kwargs)


def with_cache_of_layer(kwargs: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the arguments of a decoder layer with `CacheOfLayer` in place of the cache. A cache that offloads its
    layers, or that is not a transformers cache, is left as it is."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and not cache.offloading:
        return kwargs | {"past_key_values": CacheOfLayer(cache, index)}
    return kwargs
