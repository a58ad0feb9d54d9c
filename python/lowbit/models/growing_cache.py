# SPDX-License-Identifier: Apache-2.0
"""A cache of float keys and values that grows in place.

Its layers are those of the DynamicCache that transformers creates by default for a model with
``attn_implementation="lowbit"``. transformers concatenates, so each token copies the whole cache, or the whole window
of a sliding-window layer. Here a layer has spare capacity after its last token, and new tokens are written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lowbit.ops.tracing import is_traced

LEAST_ROOM = 256  # min spare tokens; long caches get a quarter of their length, so copies stay rare


_IN_ROOM = ...
"""Marks states that are held in the layer's `_Room`."""


class _Held:
    """The attribute ``keys`` or ``values``: a tensor that was set, or a view of the room.

    The view is made on access, because making two views per layer for each token takes measurable time.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, layer: _Growing | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        states = layer._states[self.index]
        return layer._rooms[self.index].written if states is _IN_ROOM else states

    def __set__(self, layer: _Growing, states: Tensor | None) -> None:
        layer._states[self.index] = states
        layer._served = None


NewTokens = tuple[tuple[int, int, int, int], torch.dtype, torch.device, bool]
"""A description of new tokens: the shape of their keys and values (B, H, E, Ev), and all else that decides whether a
room can hold them."""


def new_tokens(batch: int, heads: int, size: int, like: Tensor, value_size: int | None = None) -> NewTokens:
    """Describe tokens of this shape, with the dtype and device of ``like``. Values have the size of keys by default."""
    sizes = size, size if value_size is None else value_size
    return (batch, heads, *sizes), like.dtype, like.device, torch.is_inference_mode_enabled()


class _Growing:
    """The base of both kinds of layers, whose ``keys`` and ``values`` ``[B, H, S, E]`` are parts of larger tensors.

    After a `crop`, new tokens overwrite the removed ones, also in views of ``keys`` that were taken before it. Tensors
    that require grad, and compiled calls, concatenate as in transformers.
    """

    keys = _Held(0)
    values = _Held(1)
    _longest: int | None = None
    """The max number of tokens for which spare capacity is allocated, or None for no limit."""
    _served: NewTokens | None = None
    """The tokens that the rooms are known to hold, up to `_capacity`. It is reset when anything else is done with the
    layer. This saves all the checks of `_Room.make` for each token."""
    _capacity = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._states: list[Any] = [None, None]
        super().__init__(*args, **kwargs)
        self._begin_anew()

    def __copy__(self) -> Any:
        """Return an independent copy. Both layers copy their tokens before they write again, because after a crop they
        would write their next tokens to the same memory."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        states = [self.keys, self.values]
        for layer in (self, twin):
            layer._states = list(states)
            layer._begin_anew()
        return twin

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return the states that these tokens may see, including their own."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._served = None
        held = self.keys, self.values, key_states, value_states
        if is_traced() or (torch.is_grad_enabled() and any(states.requires_grad for states in held)):
            return super().update(key_states, value_states, *args, **kwargs)
        self._lay_side_by_side(key_states.shape, value_states.shape[-1], key_states)
        for room, states, new in zip(self._rooms, (self.keys, self.values), held[2:], strict=True):
            room.append(states, new)
        return self.last(self._count(key_states.shape[-2]))

    def room_for(self, length: int, new: NewTokens, like: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """Return tensors for keys and values, and the index in them at which to write the next ``length`` tokens.

        These tokens may see everything before the index. Call `extend` once they are written. The result is None if
        they can only be appended by `update`.
        """
        keys, values = self._rooms
        if new == self._served and keys.begin + keys.total + length <= self._capacity:
            return self._behind(keys.total)
        if not self.is_initialized:
            self.lazy_initialization(like, like)
        held, (batch, heads, *sizes) = self._held(), new[0]
        if not self._are_of(held, like):
            return None
        self._lay_side_by_side((batch, heads, length, sizes[0]), sizes[1], like)
        for room, states, size in zip(self._rooms, self._states, sizes, strict=True):
            room.make(states, held, (batch, heads, held + length, size), like)
        if self._states[0] is _IN_ROOM is self._states[1] and (keys.begin, keys.total) == (values.begin, values.total):
            self._served, self._capacity = new, min(room.states.shape[-2] for room in self._rooms)
        return self._behind(held)

    def _behind(self, held: int) -> tuple[Tensor, Tensor, int]:
        """Return keys and values, with spare capacity, that the tokens after the first ``held`` may see, and how many
        tokens these are."""
        keys, values = self._rooms
        seen = self._seen(held)
        if seen == held and not (keys.begin or values.begin):
            return keys.states, values.states, seen
        return keys.behind(held - seen), values.behind(held - seen), seen

    def extend(self, length: int) -> int:
        """Count ``length`` more tokens, which were written to the room. Return how many tokens they may see: the `last`
        ones."""
        keys, values = self._rooms
        keys.total = values.total = self._held() + length
        keys.view = values.view = None
        return self._count(length)

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the last ``count`` tokens in the room."""
        keys, values = self._rooms
        return keys.last(count), values.last(count)

    def reset(self) -> None:
        """Forget all tokens and free their memory."""
        super().reset()
        self._begin_anew()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        before = (self.keys, self.values) if self.is_initialized else ()
        super().crop(tokens_to_remove)
        for room, old, states in zip(self._rooms, before, (self.keys, self.values), strict=False):
            room.narrow_to(old, states)

    def _are_of(self, held: int, like: Tensor) -> bool:
        """Whether the states, if there are any, have the dtype of ``like``."""
        all_states = zip(self._rooms, self._states, strict=True)
        return not held or all((room.states if s is _IN_ROOM else s).dtype is like.dtype for room, s in all_states)

    def _lay_side_by_side(self, shape: Sequence[int], value_size: int, like: Tensor) -> None:
        """Let the rooms be columns of one tensor, with space for tokens of this shape, if keys and values are what
        latent attention keeps: one head, whose rotated keys, stored as values, have another size than its latent
        vectors, stored as keys. Its attention reads both as one row."""
        batch, heads, length, size = shape
        held = self._held()
        if heads > 1 or size == value_size or self._longest is not None or not self._are_of(held, like):
            return
        rooms, sizes, total = self._rooms, (size, value_size), held + length
        fit = all(
            room.owns(states) and room.takes((batch, heads, total, columns), like)
            for room, states, columns in zip(rooms, self._states, sizes, strict=True)
        )
        if fit and side_by_side(*(room.states for room in rooms)) is not None:
            return
        whole = like.new_empty((batch, heads, total + spare_tokens(total), sum(sizes)))
        for i, (room, states, columns) in enumerate(zip(rooms, self._states, whole.split(sizes, dim=-1), strict=True)):
            room.move_to(columns, states, held)
            room.hold(held)
            self._states[i] = _IN_ROOM

    def _begin_anew(self) -> None:
        self._rooms = _Room(self._longest), _Room(self._longest)
        self._served = None

    def _held(self) -> int:
        """Return the number of tokens in ``keys``."""
        states = self._states[0]
        if states is _IN_ROOM:
            return self._rooms[0].total
        return states.shape[-2] if self.is_initialized and states.numel() else 0

    def _seen(self, held: int) -> int:
        """Return how many of the ``held`` tokens new ones may see."""
        return held

    def _count(self, length: int) -> int:
        """Set the states to the tokens in the rooms, the last ``length`` of which are new. Return how many tokens these
        may see."""
        self._states[:] = _IN_ROOM, _IN_ROOM
        return self._rooms[0].total


class GrowingLayer(_Growing, DynamicLayer):
    """A `DynamicLayer` whose tokens are at the start of larger tensors."""

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self._held()


class GrowingSlidingLayer(_Growing, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer` whose window moves through larger tensors. When it reaches their end, it is copied
    to the start of new ones."""

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        self._longest = sliding_window + max(sliding_window, LEAST_ROOM)
        super().__init__(sliding_window, **kwargs)

    def _seen(self, held: int) -> int:
        return min(held, self.sliding_window - 1)

    def _count(self, length: int) -> int:
        self.cumulative_length += length
        seen = self._seen(super()._count(length) - length) + length
        if not self.record_past:  # with record_past, `crop` drops the tokens before the window
            for room in self._rooms:
                room.keep_last(self.sliding_window - 1)
        return seen


class _Room:
    """The memory of a layer's keys or values: a tensor with capacity for more tokens than it has.

    If the layer no longer holds the tokens written last (because a copy of it was continued, or its states were set),
    new memory is allocated. Otherwise two layers would write to the same memory.
    """

    def __init__(self, longest: int | None) -> None:
        self.longest = longest
        self.states: Tensor | None = None
        self.begin = 0
        """The index of the layer's first token, valid while the layer uses this room; the layer has `total` tokens."""
        self.total = 0
        self.view: Tensor | None = None
        """The view of the layer's tokens, once it was requested."""

    @property
    def written(self) -> Tensor | None:
        """The part of ``states`` that holds tokens, as a view."""
        if self.view is None and self.states is not None:
            self.view = self.states.narrow(-2, self.begin, self.total)
        return self.view

    def append(self, held: Tensor, new: Tensor) -> None:
        """Write ``new [B, H, L, E]`` after ``held [B, H, S, E]``."""
        length = held.shape[-2] if held.numel() else 0
        total = length + new.shape[-2]
        if length and held.dtype != new.dtype:
            self.states, self.begin = torch.cat([held, new], dim=-2), 0
        else:
            self.make(held, length, (*new.shape[:-2], total, new.shape[-1]), new)
            self.behind(length).narrow(-2, 0, total - length).copy_(new)
        self.hold(total)

    def make(self, held: Any, length: int, shape: tuple[int, ...], like: Tensor) -> None:
        """Ensure that ``states`` has, from ``begin`` on, the ``length`` tokens of ``held`` and capacity for ``shape``.

        A prompt longer than ``longest`` gets no spare capacity, because the next token does not see most of it.
        """
        if self.owns(held) and self.takes(shape, like):
            return
        *batch, total, size = shape
        more = 0 if self.longest is not None and total > self.longest else spare_tokens(total)
        self.move_to(like.new_empty((*batch, total + more, size)), held, length)

    def owns(self, held: Any) -> bool:
        """Whether these states are the tokens that were written here."""
        return held is _IN_ROOM or held is self.view

    def move_to(self, memory: Tensor, held: Any, length: int) -> None:
        """Copy the ``length`` tokens of ``held`` to the start of new memory."""
        if held is _IN_ROOM:
            held = self.written
        self.states, self.begin, self.view = memory, 0, None
        if length:
            self.states.narrow(-2, 0, length).copy_(held)

    def behind(self, count: int) -> Tensor:
        """Return the states from token ``count`` on, including spare capacity."""
        first = self.begin + count
        return self.states.narrow(-2, first, self.states.shape[-2] - first) if first else self.states

    def last(self, count: int) -> Tensor:
        """Return the ``count`` tokens written last, which may begin before ``begin``."""
        return self.states.narrow(-2, self.begin + self.total - count, count)

    def hold(self, total: int) -> None:
        """Count the first ``total`` tokens as written."""
        self.total, self.view = total, None

    def keep_last(self, count: int) -> None:
        """Forget all but the last ``count`` tokens."""
        if self.total > count:
            self.begin, self.total, self.view = self.begin + self.total - count, count, None

    def narrow_to(self, before: Tensor, held: Tensor) -> None:
        """Continue after ``held``, which is a part of the layer's former tokens ``before``."""
        if before is self.view:
            self.begin += (held.storage_offset() - before.storage_offset()) // max(1, held.stride(-2))
            self.total, self.view = held.shape[-2], held

    def takes(self, shape: tuple[int, ...], like: Tensor) -> bool:
        """Whether there is room for tokens of this shape."""
        states = self.states
        if states is None:
            return False
        if states.is_inference() and not torch.is_inference_mode_enabled():  # torch refuses to write to it
            return False
        *batch, room, size = states.shape
        same = like.dtype is states.dtype and like.device == states.device
        return same and (*batch, size) == (*shape[:-2], shape[-1]) and self.begin + shape[-2] <= room


def spare_tokens(total: int) -> int:
    """Return how many more tokens memory for ``total`` tokens has room for."""
    return max(LEAST_ROOM, total // 4)


def side_by_side(keys: Tensor, values: Tensor) -> Tensor | None:
    """Return the tensor whose first columns are ``keys [B, H, S, E]`` and whose others ``values [B, H, S, Ev]``, or None
    if they do not lie so in memory."""
    size, columns = keys.shape[-1], keys.shape[-1] + values.shape[-1]
    if keys.shape[:-1] != values.shape[:-1] or keys.stride() != values.stride() or keys.stride(-2) != columns:
        return None
    if keys.dtype is not values.dtype or keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
        return None
    if values.storage_offset() != keys.storage_offset() + size:
        return None
    return keys.as_strided((*keys.shape[:-1], columns), keys.stride())
