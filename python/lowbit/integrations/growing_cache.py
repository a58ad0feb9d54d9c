# SPDX-License-Identifier: Apache-2.0
"""A cache of float keys and values that grows in place: the layers of the DynamicCache that transformers makes by
itself for a model with ``attn_implementation="lowbit"``.

transformers concatenates, so that each token moves the whole cache. Here a layer has room behind its last token, and a
new one is written there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

LEAST_ROOM = 256  # tokens; a quarter of a longer cache: 1 of 5 tokens is moved once more, however long it gets


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose ``keys`` and ``values`` ``[B, H, S, E]`` are the beginnings of larger tensors.

    Tokens behind a `crop` are overwritten by the next ones, also in views of ``keys`` that were taken before it. What
    needs a gradient, and what is compiled, is concatenated as before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rooms = _Room(), _Room()

    def __copy__(self) -> GrowingLayer:
        """A copy that goes on by itself. Both move what they hold before they write again: where one was cropped, its
        next token would stand in the place of the other's last."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        for layer in (self, twin):
            layer._rooms = _Room(), _Room()
        return twin

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.keys, self.values, key_states, value_states
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(states.requires_grad for states in held)):
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._rooms[0].append(self.keys, key_states)
        self.values = self._rooms[1].append(self.values, value_states)
        return self.keys, self.values

    def room_for(self, length: int, shape: tuple[int, int, int], like: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """Return tensors of keys and values, and the place in them that the next ``length`` tokens of ``shape``
        (B, H, E) are to be written to; `extend` makes them count. None: they can only be appended by `update`."""
        if not self.is_initialized:
            self.lazy_initialization(like, like)
        held = self.get_seq_length()
        if held and not self.keys.dtype is self.values.dtype is like.dtype:
            return None
        batch, heads, size = shape
        for room, states in zip(self._rooms, (self.keys, self.values), strict=True):
            room.make(states, held, (batch, heads, held + length, size), like)
        return self._rooms[0].states, self._rooms[1].states, held

    def extend(self, length: int) -> tuple[Tensor, Tensor]:
        """Count ``length`` tokens more, which were written to the room; return keys and values of all."""
        total = self.get_seq_length() + length
        self.keys, self.values = (room.hold(total) for room in self._rooms)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens, and free their memory."""
        super().reset()
        self._rooms = _Room(), _Room()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        before = (self.keys, self.values) if self.is_initialized else ()
        super().crop(tokens_to_remove)
        for room, old, states in zip(self._rooms, before, (self.keys, self.values), strict=False):
            room.forget_behind(old, states)


class _Room:
    """A tensor with room for more tokens than it has: the memory of one layer.

    Where the layer holds something else than what was written last (a copy of it went on, or somebody has set its
    states), the room begins anew, since both would write the same tokens.
    """

    def __init__(self) -> None:
        self.states: Tensor | None = None
        self.written: Tensor | None = None
        """The beginning of ``states`` that holds tokens: what the layer holds, as long as this room is its own."""

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """Write ``new [B, H, L, E]`` behind ``held [B, H, S, E]``; return both ``[B, H, S + L, E]``."""
        length = held.shape[-2] if held.numel() else 0
        total = length + new.shape[-2]
        if length and held.dtype != new.dtype:
            return torch.cat([held, new], dim=-2)
        self.make(held, length, (*new.shape[:-2], total, new.shape[-1]), new)
        self.states.narrow(-2, length, total - length).copy_(new)
        return self.hold(total)

    def make(self, held: Tensor, length: int, shape: tuple[int, ...], like: Tensor) -> None:
        """See to it that ``states`` begins with the ``length`` tokens of ``held`` and has room for ``shape``."""
        if held is self.written and self._takes(shape, like):
            return
        *batch, total, size = shape
        self.states = like.new_empty((*batch, total + max(LEAST_ROOM, total // 4), size))
        if length:
            self.states.narrow(-2, 0, length).copy_(held)

    def hold(self, total: int) -> Tensor:
        """Count the first ``total`` tokens as written, and return them."""
        self.written = self.states.narrow(-2, 0, total)
        return self.written

    def forget_behind(self, before: Tensor, held: Tensor) -> None:
        """Let the next tokens stand behind ``held``, the beginning of what the layer held ``before``."""
        if before is self.written:
            self.written = held

    def _takes(self, shape: tuple[int, ...], like: Tensor) -> bool:
        states = self.states
        if states.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse to write to it
            return False
        *batch, room, size = states.shape
        same = like.dtype is states.dtype and like.device == states.device
        return same and (*batch, size) == (*shape[:-2], shape[-1]) and shape[-2] <= room


def growing_layer(cache: Any, index: int | None) -> GrowingLayer | None:
    """The layer of a cache that new tokens can be written to in place, if it is one."""
    if type(cache) is not DynamicCache or cache.offloading or index is None or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is GrowingLayer else None


def grow_caches_in_place(implementation: str) -> None:
    """Let every DynamicCache that is made for a model with this attention have layers that grow in place.

    transformers has no hook here: it makes this class by name, in ``generate`` and in each model's ``forward``.
    """
    make = DynamicCache.__init__

    @functools.wraps(make)
    def make_growing(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        if config is None or config.get_text_config(decoder=True)._attn_implementation != implementation:
            return
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                self.layers[i] = GrowingLayer()

    DynamicCache.__init__ = make_growing
