# SPDX-License-Identifier: Apache-2.0
"""What a layer of a decoder keeps of earlier tokens, and where: keys and values, latent vectors, or the states of a
recurrent layer, in a cache that is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from lowbit.models.croppable_states import CroppableStates
from lowbit.models.growing_cache import GrowingLayer, new_tokens, side_by_side
from lowbit.models.hybrid_cache import GROWING, GrowingHybridLayer
from lowbit.models.recurrent_layers import STATE_DTYPES, LinearAttentionLayer

Found = tuple[Any, Sequence[Tensor], int]
"""An object whose `extend` counts new tokens, the states, and the number of tokens in front of the new ones."""


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """The keys and values of attention, ``[B, heads, S, size]``."""

    heads: int
    size: int
    count: ClassVar[int] = 2

    def new(self, x: Tensor, length: int) -> Sequence[Tensor]:
        """Return memory for ``length`` tokens of a call without a cache."""
        return x.new_empty(2, x.shape[0], self.heads, length, self.size).unbind()

    def found(self, layer: Any, x: Tensor, length: int) -> Found | None:
        """Return where in a layer of a cache the next ``length`` tokens are written, or None if only its ``update`` can
        add them."""
        if type(layer) not in GROWING:
            return None
        room = layer.room_for(length, new_tokens(x.shape[0], self.heads, self.size, x), x)
        return None if room is None else (layer, room[:2], room[2])


@dataclass(frozen=True, slots=True)
class LatentVectors:
    """What latent attention keeps of a token: a latent vector and a rotated key beside it, as one head of keys
    ``[B, 1, S, rank + rotated]``, of which the values are the first columns."""

    rank: int
    rotated: int
    count: ClassVar[int] = 2

    def new(self, x: Tensor, length: int) -> Sequence[Tensor]:
        """Return memory for ``length`` tokens of a call without a cache."""
        return self._states(x.new_empty(x.shape[0], 1, length, self.rank + self.rotated))

    def found(self, layer: Any, x: Tensor, length: int) -> Found | None:
        """Return where in a layer of a cache the next ``length`` tokens are written, or None if only its ``update`` can
        add them."""
        if type(layer) is not GrowingLayer:
            return None
        room = layer.room_for(length, new_tokens(x.shape[0], 1, self.rank, x, self.rotated), x)
        whole = None if room is None else side_by_side(*room[:2])
        return None if whole is None else (layer, self._states(whole), room[2])

    def _states(self, whole: Tensor) -> Sequence[Tensor]:
        return whole, whole[..., : self.rank]


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """The last inputs of a convolution ``[B, channels, taps]``, and the state ``[B, *shape]`` behind it, if the layer has
    one: float32, or in a croppable cache that of the cache."""

    channels: int
    taps: int
    shape: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of tensors."""
        return 2 if self.shape else 1

    def new(self, x: Tensor, length: int) -> Sequence[Tensor]:
        """Return the states before the first token."""
        conv = x.new_zeros(x.shape[0], self.channels, self.taps)
        return (conv, x.new_zeros(x.shape[0], *self.shape, dtype=torch.float32)) if self.shape else (conv,)

    def found(self, layer: Any, x: Tensor, length: int) -> Found | None:
        """Return the states of a layer of a cache, which are made first if it has none, or None if a step cannot go on
        from them: they have another dtype or layout, or past ones are recorded for assisted decoding."""
        crops = isinstance(layer, CroppableStates)
        if LinearAttentionLayer is None or not (crops or type(layer) in (LinearAttentionLayer, GrowingHybridLayer)):
            return None
        if layer.record_past or layer.number_of_states != 1:
            return None
        if crops and layer.left < length:  # a program cannot stop where states are kept
            return None
        conv, state = layer.conv_states, layer.recurrent_states
        if conv[0] is None:
            layer.lazy_initialization(conv_states=x.new_empty(x.shape[0], self.channels, self.taps))
        if self.shape and state[0] is None:
            dtype = layer.state_dtype if crops else torch.float32
            layer.lazy_initialization(recurrent_states=x.new_empty(x.shape[0], *self.shape, dtype=dtype))
        wanted = [(conv[0], (x.dtype,), (x.shape[0], self.channels, self.taps))]
        if self.shape:
            wanted.append((state[0], STATE_DTYPES, (x.shape[0], *self.shape)))
        for tensor, dtypes, shape in wanted:
            if tensor.dtype not in dtypes or tensor.shape != shape or not (tensor.is_cpu and tensor.is_contiguous()):
                return None
            if tensor.is_inference() and not torch.is_inference_mode_enabled():  # torch refuses to write to it
                return None
        if crops:
            layer.settle()
        return _Stepped(layer), [tensor for tensor, _, _ in wanted], 0


class _Stepped:
    """A layer of a cache whose states a step writes."""

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def extend(self, length: int) -> None:
        if isinstance(self.layer, CroppableStates):
            self.layer.advance(length)
        self.layer.has_previous_state[0] = True


Memory = KeysAndValues | LatentVectors | RecurrentStates


def layers_in(cache: Any, kept: Sequence[tuple[Memory, int | None]]) -> list[Any] | None:
    """Return the layers of a cache for what is kept and its index, or None if the cache has them elsewhere than in memory,
    does not have all of them, or two of a kind are the same."""
    indices = [index for _, index in kept]
    if type(cache) is not DynamicCache or cache.offloading or None in indices or max(indices, default=0) >= len(cache.layers):
        return None
    found = [cache.layers[index] for index in indices]
    of_kinds = {(id(layer), type(memory)) for layer, (memory, _) in zip(found, kept, strict=True)}
    return None if len(of_kinds) < len(found) else found
