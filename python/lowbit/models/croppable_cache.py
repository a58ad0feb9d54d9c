# SPDX-License-Identifier: Apache-2.0
"""A cache of a model with recurrent layers that can be cropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from lowbit.models.croppable_states import CroppableStates, LinearAttentionLayer
from lowbit.models.growing_cache import GrowingLayer
from lowbit.models.hybrid_cache import CroppableHybridLayer, GrowingHybridLayer
from lowbit.models.recurrent_layers import STATE_DTYPES

try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # the first versions of transformers 5 have none
    DummyLayer = GrowingLayer


def croppable_cache(model: nn.Module, every: int = 256, state_dtype: torch.dtype = torch.float32) -> DynamicCache:
    """Return an empty cache for a model with recurrent layers, from which tokens can be taken out again.

    transformers refuses to crop recurrent states, and so assisted decoding with such models. This cache keeps the states
    behind every ``every``-th token and, of the last call of the model, what a crop to its last tokens needs. Pass it
    to ``generate`` as ``past_key_values``: ``assistant_model`` and ``prompt_lookup_num_tokens`` work then, and
    `rewind_cache` goes back to the prefix that a next prompt shares.

    Args:
        model: a model of transformers that `fuse` has changed, with ``attn_implementation="lowbit"``.
        every: after how many tokens states are kept. They take as much memory as the states of one sequence.
        state_dtype: the dtype of recurrent states. In bfloat16 they take half of the memory, and are rounded once for
            each call of a layer: for each token of an answer.

    Returns:
        A ``DynamicCache``. Its layers are those of a new one, but for the recurrent ones.

    Raises:
        ValueError: ``every`` is below 1, ``state_dtype`` is neither float32 nor bfloat16, the model has no recurrent
            layers, or one whose states cannot be kept. The message names it.

    Example:
        >>> cache = lowbit.croppable_cache(model)
        >>> model.generate(**tokens, past_key_values=cache, prompt_lookup_num_tokens=8)
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"croppable_cache: every must be a number of tokens from 1 on, got {every!r}")
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"croppable_cache: state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype!r}")
    cache = DynamicCache(config=model.config)
    recurrent = [i for i, layer in enumerate(cache.layers) if type(layer) in (LinearAttentionLayer, GrowingHybridLayer)]
    served = (LinearAttentionLayer, GrowingHybridLayer, GrowingLayer, DummyLayer)
    others = [(i, layer) for i, layer in enumerate(cache.layers) if type(layer) not in served]
    if others:
        i, layer = others[0]
        raise ValueError(
            "croppable_cache: model must have layers of recurrent states or of lowbit's attention without a window "
            f'(attn_implementation="lowbit"), got a {type(layer).__name__} for layer {i}'
        )
    if not recurrent or any(cache.layers[i].number_of_states != 1 for i in recurrent):
        told = "none" if not recurrent else "layers with several states"
        raise ValueError(f"croppable_cache: model must have recurrent layers with one state each, got {told}")
    for i in recurrent:
        kind = CroppableStates if type(cache.layers[i]) is LinearAttentionLayer else CroppableHybridLayer
        cache.layers[i] = kind(every, state_dtype)
    return cache


def is_croppable(cache: Any) -> bool:
    """Whether a cache was made by `croppable_cache`."""
    return type(cache) is DynamicCache and any(isinstance(layer, CroppableStates) for layer in cache.layers)


def rewind_cache(cache: DynamicCache, length: int) -> int:
    """Take tokens out of a cache of `croppable_cache`, until at most ``length`` are left.

    Args:
        cache: the cache.
        length: the number of tokens at its beginning that a next prompt shares.

    Returns:
        The number of tokens that are left: the last one behind which the states of all layers can be recalled. It is
        ``length`` among the last ``every`` tokens of a last call that ran module by module, and otherwise less by at most
        ``every`` - 1.

    Raises:
        ValueError: the cache is another one, or has fewer tokens. Nothing has changed then.

    Example:
        >>> left = lowbit.rewind_cache(cache, len(shared_prefix))
    """
    layers = recurrent_layers_of("rewind_cache", cache)
    held = layers[0].length
    if type(length) is not int or not 0 <= length <= held:
        raise ValueError(f"rewind_cache: length must be from 0 to {held}, the tokens in the cache, got {length!r}")
    left = length
    while (nearest := min(layer.reachable(left) for layer in layers)) < left:
        left = nearest
    cache.crop(left - held)
    return left


def recurrent_layers_of(call: str, cache: Any) -> list[CroppableStates]:
    """Return the recurrent layers of a cache of `croppable_cache`; raise ValueError in the name of ``call`` if it is
    another one."""
    if not is_croppable(cache):
        raise ValueError(f"{call}: cache must be one of lowbit.croppable_cache, got a {type(cache).__name__}")
    return [layer for layer in cache.layers if isinstance(layer, CroppableStates)]
