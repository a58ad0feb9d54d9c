# SPDX-License-Identifier: Apache-2.0
"""Layers of a cache that have keys and values, which grow in place, beside the states of a recurrent layer (Falcon-H1);
and the layers of new caches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lowbit.models.croppable_states import CroppableStates, LinearAttentionLayer
from lowbit.models.growing_cache import GrowingLayer, GrowingSlidingLayer

try:
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer
except ImportError:  # the first versions of transformers 5 have no cache for them, and none of these models
    LinearAttentionAndFullAttentionLayer = object


class _Hybrid:
    """What both kinds of such layers share: a call for keys and values, and one for the states."""

    is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values for two tensors, or states for those that are named."""
        if args:
            DynamicLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        """Move keys, values and states to the CPU."""
        DynamicLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Move keys, values and states back to their device."""
        DynamicLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)


class GrowingHybridLayer(_Hybrid, GrowingLayer, LinearAttentionAndFullAttentionLayer):
    """The keys and values of a `GrowingLayer` and the states of a layer of transformers."""


class CroppableHybridLayer(_Hybrid, CroppableStates, GrowingLayer):
    """The keys and values of a `GrowingLayer` and states that can be cropped.

    Args:
        every: after how many tokens states are kept.
        state_dtype: the dtype of recurrent states, float32 or bfloat16.
    """

    def __init__(self, every: int, state_dtype: torch.dtype = torch.float32) -> None:
        CroppableStates.__init__(self, every, state_dtype)
        GrowingLayer.__init__(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: the states behind the tokens that are left cannot be recalled. Nothing has changed then.
        """
        CroppableStates.crop(self, tokens_to_remove)
        if self.length:
            GrowingLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx`` of keys, values and all states."""
        CroppableStates.reorder_cache(self, beam_idx)
        DynamicLayer.reorder_cache(self, beam_idx)


GROWING = (GrowingLayer, GrowingHybridLayer, CroppableHybridLayer, GrowingSlidingLayer)
"""The classes of layers of a cache to which new keys and values can be written in place."""


def growing_layer(cache: Any, index: int | None) -> GrowingLayer | GrowingSlidingLayer | None:
    """Return the layer of a cache if new tokens can be written to it in place, else None."""
    if type(cache) is not DynamicCache or cache.offloading or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if type(layer) in GROWING else None


def grow_caches_in_place(implementation: str) -> None:
    """Give every DynamicCache of a model with this attention implementation layers that grow in place.

    This replaces `DynamicCache.__init__`, because transformers has no hook: it creates this class by name, in
    ``generate`` and in each model's ``forward``.
    """
    make = DynamicCache.__init__

    @functools.wraps(make)
    def make_growing(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        if config is None or config.get_text_config(decoder=True)._attn_implementation != implementation:
            return
        for i, layer in enumerate(self.layers):
            # Other layers, such as the states of linear attention, stay as they are.
            if type(layer) is DynamicLayer and not layer.is_initialized:
                self.layers[i] = GrowingLayer()
            elif type(layer) is LinearAttentionAndFullAttentionLayer and not layer.is_initialized:
                self.layers[i] = GrowingHybridLayer(layer.number_of_states)
            elif type(layer) is DynamicSlidingWindowLayer and not layer.is_initialized and layer.sliding_window > 1:
                self.layers[i] = GrowingSlidingLayer(layer.sliding_window)  # a window of 1 keeps all tokens

    DynamicCache.__init__ = make_growing
