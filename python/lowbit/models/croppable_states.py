# SPDX-License-Identifier: Apache-2.0
"""CroppableStates: the states of a recurrent layer in a cache that can be cropped.

A state has no length: tokens cannot be taken out of it. So the states behind every ``every``-th token are kept, and of
the last call of the layer the inputs of its last ``every`` tokens or more. A crop takes a state that was kept, or lets the
recurrence, which reads no weights, go over a part of these inputs again. `lowbit.fuse` makes the layers that write such
states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # the first versions of transformers 5 have no cache for them, and none of these models
    LinearAttentionLayer = object

Recurrence = Callable[[Sequence[Tensor], "Tensor | None"], tuple[Tensor, Tensor]]
"""Returns the results for tensors ``[B, T, ...]`` that go on from a state, or from none, and the state behind them, in
memory of its own."""


class _History:
    """What can be recalled of one kind of states. All states are those behind a number of tokens, in ``dtype``, or that in
    which a recurrence returns them."""

    def __init__(self, every: int, dtype: torch.dtype | None = None) -> None:
        self.every, self.dtype, self.length = every, dtype, 0
        self.kept: dict[int, Tensor | None] = {0: None}
        self.start = 0
        """The number of tokens in front of ``inputs``, whose state is kept."""
        self.inputs: tuple[Recurrence, list[Tensor]] | None = None
        """The recurrence and its inputs since ``start``, or None if a program computed them."""

    def run(self, scan: Recurrence, tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the results for new tokens and the state behind them. ``state`` is that in front of them."""
        first, length = self.length, tensors[0].shape[1]
        self.begin(state)
        parts, done, begin = [], 0, 0
        for end in [*range(self.every - first % self.every, length, self.every), length]:
            y, state = self._step(scan, [tensor[:, done:end] for tensor in tensors], state)
            parts.append(y)
            if end < length:
                self.kept[first + end], done = state, end
                begin = end if length - end >= self.every else begin
        self.length, self.start = first + length, first + begin
        last = [tensor.detach()[:, begin:] for tensor in tensors]
        self.inputs = scan, [tensor.clone() for tensor in last] if begin else last  # a view would keep a whole prompt
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), state

    def begin(self, state: Tensor | None) -> None:
        """Keep the state in front of the next tokens, instead of that in front of the last ones."""
        if self.start % self.every:
            self.kept.pop(self.start, None)
        self.start, self.inputs = self.length, None
        if self.length:
            self.kept[self.length] = state

    def reaches(self, length: int) -> bool:
        """Whether the state of ``length`` tokens can be recalled."""
        return length in self.kept or (self.inputs is not None and self.start < length < self.length)

    def crop(self, length: int) -> Tensor | None:
        """Forget all but the first ``length`` tokens, and return the state behind them."""
        if self.inputs is not None and self.start < length:
            scan, tensors = self.inputs
            self.inputs = scan, [tensor[:, : length - self.start] for tensor in tensors]
        else:
            self.start, self.inputs = length, None
        if length not in self.kept:
            near = max(at for at in self.kept if at < length)
            state = self._step(scan, [tensor[:, near - self.start :] for tensor in self.inputs[1]], self.kept[near])[1]
        else:
            state = self.kept[length]
        self.kept = {at: kept for at, kept in self.kept.items() if at <= length}
        self.length = length
        return state

    def _step(self, scan: Recurrence, tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = scan(tensors, state)
        return y, state if self.dtype is None else state.to(self.dtype)


class CroppableStates(LinearAttentionLayer):
    """One state of a convolution and, if the layer has one, a recurrent state.

    Args:
        every: after how many tokens states are kept.
        state_dtype: the dtype of recurrent states, float32 or bfloat16.
    """

    is_compileable = False

    def __init__(self, every: int, state_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.every, self.state_dtype = every, state_dtype
        self._histories = _History(every), _History(every, state_dtype)

    @property
    def length(self) -> int:
        """The number of tokens in the states."""
        return self._histories[0].length

    @property
    def left(self) -> int:
        """The number of tokens until states are kept again."""
        return self.every - self.length % self.every

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken out."""
        return True

    def convolve(self, scan: Recurrence, x: Tensor, taps: int) -> Tensor:
        """Return the convolution of x ``[B, T, C]``; its states are ``[B, C, taps]``."""
        y, state = self._histories[0].run(scan, [x], self.conv_states[0])
        self._set(0, state)
        self.conv_kernel_size[0] = taps
        return y

    def recur(self, scan: Recurrence, tensors: Sequence[Tensor]) -> Tensor:
        """Return the results of a recurrence over tensors ``[B, T, ...]``."""
        y, state = self._histories[1].run(scan, tensors, self.recurrent_states[0])
        self._set(1, state)
        return y

    def settle(self) -> None:
        """Prepare for tokens that a program writes into the states: those in front of them are kept elsewhere."""
        for history, state in self._pairs():
            history.begin(state.clone() if history.length else None)

    def advance(self, length: int) -> None:
        """Count tokens that a program wrote into the states."""
        for history, _ in self._pairs():
            history.length += length
        self.has_previous_state[0] = True

    def reachable(self, length: int) -> int:
        """Return the largest number of tokens up to ``length`` to which a crop is possible."""
        lengths = range(min(length, self.length), -1, -1)
        return next(at for at in lengths if at == self.length or all(each.reaches(at) for each, _ in self._pairs()))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: the states behind the tokens that are left cannot be recalled. Nothing has changed then.
        """
        length = self.length + tokens_to_remove
        if tokens_to_remove > 0 or length < 0:
            raise ValueError(f"crop: tokens_to_remove must be from {-self.length} to 0, got {tokens_to_remove}")
        if (nearest := self.reachable(length)) != length:
            raise ValueError(
                f"crop: the states of {length} tokens must be kept, got none between {nearest} and {length} tokens: "
                f"lowbit.rewind_cache(cache, {length}) goes back to {nearest}"
            )
        if length == 0 < self.length:
            self.reset()
        elif length < self.length:
            for number, (history, _) in enumerate(self._pairs()):
                self._set(number, history.crop(length))

    def reset(self) -> None:
        """Forget all tokens and free their memory."""
        recording = self.record_past
        self.__init__(self.every, self.state_dtype)
        self.record_past = recording

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx`` of all states."""
        super().reorder_cache(beam_idx)
        for history in self._histories:
            history.kept = {at: None if kept is None else kept[beam_idx] for at, kept in history.kept.items()}
            if history.inputs is not None:
                scan, tensors = history.inputs
                history.inputs = scan, [tensor[beam_idx] for tensor in tensors]

    def states(self) -> dict[int, tuple[Tensor, ...]]:
        """Return the kept states by their number of tokens, and those of all tokens."""
        pairs = self._pairs()
        lengths = [at for at in self._histories[0].kept if 0 < at < self.length]
        kept = {at: tuple(history.kept[at] for history, _ in pairs) for at in lengths}
        return kept | ({self.length: tuple(state for _, state in pairs)} if self.length else {})

    def hold(self, states: dict[int, tuple[Tensor, ...]]) -> None:
        """Take the result of `states` of another layer."""
        self.reset()
        for length in sorted(states):
            for number, state in enumerate(states[length]):
                history = self._histories[number]
                history.kept[length], history.length, history.start = state, length, length
                self._set(number, state)
            self.conv_kernel_size[0] = states[length][0].shape[-1]

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise RuntimeError: only layers that `lowbit.fuse` made write these states."""
        raise RuntimeError(_ONLY_FUSED)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise RuntimeError, as `update_conv_state`."""
        raise RuntimeError(_ONLY_FUSED)

    def _pairs(self) -> list[tuple[_History, Tensor]]:
        """Return the histories that are in use, with their states."""
        states = self.conv_states[0], self.recurrent_states[0]
        return [pair for pair in zip(self._histories, states, strict=True) if pair[1] is not None]

    def _set(self, number: int, state: Tensor) -> None:
        states, flags = (
            (self.conv_states, self.is_conv_states_initialized),
            (self.recurrent_states, self.is_recurrent_states_initialized),
        )[number]
        states[0], flags[0], self.has_previous_state[0] = state, True, True
        if number == 0:
            self.dtype, self.device = state.dtype, state.device


_ONLY_FUSED = (
    "a croppable cache is written by fused layers that record no gradients: call lowbit.fuse(model), and the model under "
    "torch.no_grad()"
)
