# SPDX-License-Identifier: Apache-2.0
"""A cache of float keys and values that grows in place: the layers of the DynamicCache that transformers makes by itself
for a model with ``attn_implementation="lowbit"``.

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

    def reset(self) -> None:
        """Forget all tokens, and free their memory."""
        super().reset()
        self._rooms = _Room(), _Room()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            for room, states in zip(self._rooms, (self.keys, self.values), strict=True):
                room.forget_behind(states)


class _Room:
    """A tensor with room for more tokens than it has.

    It is the memory of one layer: that of a copy of the layer begins anew, as does that of a layer whose states
    somebody else has set, since both would write the same tokens.
    """

    def __init__(self) -> None:
        self.states: Tensor | None = None
        self.length = 0
        self.owner = id(self)

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """Write ``new [B, H, L, E]`` behind ``held [B, H, S, E]``; return both ``[B, H, S + L, E]``."""
        length = held.shape[-2] if held.numel() else 0
        total = length + new.shape[-2]
        if length and held.dtype != new.dtype:
            return torch.cat([held, new], dim=-2)
        if not self._continues(held, length) or not self._takes(new, total):
            shape = (*new.shape[:-2], total + max(LEAST_ROOM, total // 4), new.shape[-1])
            self.states, self.owner = new.new_empty(shape), id(self)
            if length:
                self.states.narrow(-2, 0, length).copy_(held)
        self.states.narrow(-2, length, total - length).copy_(new)
        self.length = total
        return self.states.narrow(-2, 0, total)

    def forget_behind(self, held: Tensor) -> None:
        """Let the next tokens stand behind ``held``, the beginning of what was held before."""
        length = held.shape[-2] if held.numel() else 0
        if length < self.length and self._begins(held):
            self.length = length

    def _begins(self, held: Tensor) -> bool:
        states = self.states
        return states is not None and held.data_ptr() == states.data_ptr() and held.stride() == states.stride()

    def _continues(self, held: Tensor, length: int) -> bool:
        return self.owner == id(self) and length == self.length and (not length or self._begins(held))

    def _takes(self, new: Tensor, total: int) -> bool:
        states = self.states
        if states is None or total > states.shape[-2] or new.dtype != states.dtype or new.device != states.device:
            return False
        if states.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse to write to it
            return False
        return (*new.shape[:-2], new.shape[-1]) == (*states.shape[:-2], states.shape[-1])


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
        self.layers = [
            GrowingLayer() if type(layer) is DynamicLayer and not layer.is_initialized else layer for layer in self.layers
        ]

    DynamicCache.__init__ = make_growing
