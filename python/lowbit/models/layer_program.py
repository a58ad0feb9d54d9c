# SPDX-License-Identifier: Apache-2.0
"""A program that computes the layers of a decoder or an encoder, kept as long as the layers do not change.

    h = x + o(attention(rope_append(qkv(norm(x)))));  y = h + down(act(gate(norm(h))) * up(norm(h)))

for Llama, and other sums of the same pieces for others (`layer_joins.py`). The second half may be a mixture of
experts. y is the x of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.fused_attention import IDLE
from lowbit.models.half_steps import HALF_STEPS, cross_attention_steps
from lowbit.models.layer_joins import Sums
from lowbit.models.layer_memory import RecurrentStates, layers_in
from lowbit.models.recurrent_steps import RECURRENT_STEPS
from lowbit.models.steps import Steps
from lowbit.ops.program import NONE, Program
from lowbit.ops.run_program import KeptProgram
from lowbit.quant.fused import Fused, has_hooks, hooked, submodule_at
from lowbit.quant.fused_layer_norm import FusedLayerNorm
from lowbit.quant.fused_norm import FusedRMSNorm
from lowbit.quant.quant_linear import QuantLinear

_dtype_of = attrgetter("dtype")
NORMS = (FusedRMSNorm, FusedLayerNorm)
"""The classes of norms that can be steps."""


class LayerProgram(Steps):
    """The program of one or more layers. ``run`` executes it; it is None if the layers cannot be a program, for
    instance because one has a hook.

    The inputs are x, then cos, sin and mask for each kind of layer; a recurrent layer beside attention has a kind of its
    own, behind those of all layers. The states are the keys and values of each layer, or
    those of a recurrent one. The starts are the numbers of tokens in the caches of each kind. A program of several layers runs without calling
    them, so hooks on them rule it out; a program of one layer runs inside its call. The program holds no reference to a
    layer, because a layer may hold the program.

    Args:
        layers: the fused layers.
        kinds: one number per layer; layers of one kind have the same mask and rotary embedding.
        dtype: the dtype of activations and norms.
        end: writes the steps after the layers. It gets the program and the last result and returns the new result, or
            None if it cannot write them.
        causal: whether they are the layers of a decoder. Those of an encoder have one more input, the ends of packed
            sequences, which may be absent.
        crosses: whether the layers have attention to the result of an encoder too. Then the keys and values of this are
            more states, and its mask, which may be absent, is one more input.
        of_token: whether each call has one token behind others, for which Mamba-2 does not limit its steps of time.
    """

    def __init__(
        self,
        layers: Sequence[Fused] = (),
        kinds: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        end: Callable[[Any, int], int | None] | None = None,
        causal: bool = True,
        crosses: bool = False,
        of_token: bool = False,
    ) -> None:
        super().__init__(dtype)
        self.causal, self.of_token, self.kinds = causal, of_token, len(set(kinds))
        if not causal:
            self.cu_seqlens = Program.input(1 + 3 * len(set(kinds)))
        if crosses:
            self.cross_states, self.cross_mask = 2 * len(layers), Program.input(1 + 3 * len(set(kinds)))
        self._kinds, self.wide = kinds, False
        x: int | None = Program.input(0)
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            if len(layers) > 1 and has_hooks(layer):
                x = None
            x = None if x is None else self._layer(layer, i, kind, x)
            if len(layers) > 1:
                self.note_module(layer)
        if end is not None and x is not None:
            x = end(self, x)
        of_attention = {kind for memory, kind, _ in self.memories if not isinstance(memory, RecurrentStates)}
        self.recurrent = {kind for _, kind, _ in self.memories} - of_attention
        """The kinds of recurrent layers, whose mask is that of padding."""
        self.inputs = 1 + 3 * (1 + max((kind for _, kind, _ in self.memories), default=-1))
        """The number of inputs that the steps may read: layers without attention or states read no masks."""
        self.has_sides = any(kind >= self.kinds for kind in self.recurrent)
        """Whether a layer has attention and a recurrent layer side by side."""
        self._starts = max(of_attention, default=-1) + 1
        mixed = any(kind in of_attention and isinstance(memory, RecurrentStates) for memory, kind, _ in self.memories)
        self.run = KeptProgram(self.program) if layers and x is not None and not mixed else None

    def serves(self, dtype: torch.dtype, of_token: bool = False) -> bool:
        """Whether the program is valid for the layers in their current state and for activations of this dtype."""
        return (
            self.run is not None and self.dtype is dtype and self.of_token is of_token and self.holds()
            and all(map(is_, map(_dtype_of, self.norms), repeat(dtype)))  # `.to()` may keep the object
        )  # fmt: skip

    def places(
        self, x: Tensor, cache: Any, length: int | None = None
    ) -> tuple[Sequence[Any], list[Tensor], list[int]] | None:
        """Return the memory for what the layers keep of the new tokens ``x [B, L, k]``.

        The result has objects whose `extend` counts the tokens, and the states and starts of the program. Keys and
        values have space for ``length`` tokens, by default L. Without a cache, the memory is new. The result is None if
        tokens can be added to this cache only through its ``update``.
        """
        length = x.shape[1] if length is None else length
        if cache is None:
            return (), self._new(x, length), [0] * self._starts
        layers = layers_in(cache, [(memory, index) for memory, _, index in self.memories])
        if layers is None:
            return None
        found, of_kinds = [], {}
        if not layers:
            return (), [], []
        for layer, (memory, kind, _) in zip(layers, self.memories, strict=True):
            place = memory.found(layer, x, length)
            if place is None or of_kinds.setdefault(kind, place[2]) != place[2]:
                return None
            found.append(place)
        grown, states, _ = zip(*found, strict=True)
        return grown, [*chain.from_iterable(states)], [of_kinds.get(kind, 0) for kind in range(self._starts)]

    def _new(self, x: Tensor, length: int) -> list[Tensor]:
        return [*chain.from_iterable(memory.new(x, length) for memory, _, _ in self.memories)]

    def memory(self, x: Tensor) -> list[Tensor]:
        """Return the states of an encoder's program for ``x [B, L, k]``: memory for keys and values, which layers with
        the same heads share, or nothing if no step writes them."""
        kept = [memory for memory, _, _ in self.memories]
        made = {memory: memory.new(x, x.shape[1]) for memory in set(kept)}
        return [*chain.from_iterable(map(made.__getitem__, kept))]

    def _layer(self, layer: Fused, i: int, kind: int, x: int) -> int | None:
        """Write the steps of a layer and return its result, or None if the layer has changed since it was fused."""
        if not isinstance(layer, Fused):  # `unfuse` was called
            return None
        facts = layer.facts
        if not self._note_structure(layer) or (facts["joins"].clamps and self.dtype is torch.float16):
            return None
        joins, sums = facts["joins"], Sums(self.program, x)
        for join in joins.pieces:
            piece, number = submodule_at(layer, join.name), facts["activations"].get(join.name)
            if number is None:
                given = self._narrow(sums.of(join.terms), joins.wide and not joins.reads_pieces(join))
                if join.beside:
                    given = self.side_by_side([(given, facts["hidden"]), (Program.input(0), facts["hidden"])])
                if type(piece) is not QuantLinear and piece.piece in RECURRENT_STEPS and not joins.are_read_once(join):
                    given = self.program.scaled_add(given)  # a recurrent layer masks padding in its input
                of_states = facts.get("sides", False) and type(piece) is not QuantLinear and piece.piece in RECURRENT_STEPS
                write = self._writer(piece, i, kind + self.kinds if of_states else kind, given, join.crosses)
            else:  # of a linear layer, which computes it too
                of = joins.pieces[join.terms[0][1] - 1]
                linear, given = submodule_at(layer, of.name), sums.of(of.terms)
                write = partial(self._activated, linear, given, number)
                self.note_module(piece)
            if write is None:
                return None
            sums.append(self._wide(write) if joins.wide and joins.is_in_result(join) else write)
        return sums.of(joins.result)

    def _wide(self, write: Callable[[int], int]) -> Callable[[int], int]:
        """Return a function that adds what ``write`` writes to a float32 sum."""
        self.wide = self.dtype is not torch.float32
        return (lambda add: self.program.scaled_add(write(NONE), add, dtype=torch.float32)) if self.wide else write

    def _narrow(self, x: int, wide: bool = True) -> int:
        """Return a float32 sum in the dtype of activations."""
        return self.program.scaled_add(x, dtype=self.dtype) if wide and self.dtype is not torch.float32 else x

    def stream(self, x: int) -> int:
        """Return the result of the layers in the dtype of activations."""
        return self._narrow(x, self.wide)

    def _note_structure(self, layer: Fused) -> bool:
        """Record the modules of a layer whose code the program replaces. Return False if one has changed since the
        layer was fused, is in training mode, or has a hook."""
        facts = layer.facts
        for path, piece in facts["pieces"]:
            is_step = isinstance(piece, Fused) or type(piece) is QuantLinear or path in facts["activations"]
            if submodule_at(layer, path) is not piece or not is_step:
                return False
        for path, noted in facts["containers"]:
            container = submodule_at(layer, path)
            if container.training or hooked(container, container._modules) or not noted.hold(container):
                return False
            self.note(container._modules, *container._modules)
            self.note(container.__dict__, *noted.names, "training")
            if path:
                self.note_module(container)
        for path in facts["idle"]:
            idle = submodule_at(layer, path)
            if idle.training or type(idle) not in IDLE:
                return False
            self.note_module(idle)
            self.note(idle.__dict__, "training")
        return True

    def _activated(self, linear: QuantLinear, x: int, activation: int, add: int) -> int:
        return self.product(linear, x, activation=activation, add=add)

    def _writer(
        self, piece: nn.Module, i: int, kind: int, x: int, crosses: bool = False
    ) -> Callable[[int], int] | None:
        """Write a piece up to its last step, and return the function that writes this one; None if the piece cannot be
        steps in its current state."""
        if type(piece) is QuantLinear:
            return lambda add: self.product(piece, x, add=add)
        if piece.piece in NORMS:
            return (lambda add: self.norm(piece, x, add=add)) if self.takes_norm(piece) else None
        write = HALF_STEPS[piece.piece]
        written = cross_attention_steps(self, piece, i, x) if crosses else write(self, piece, i, kind, x)
        if written is None:
            return None
        operand, linear = written
        if linear is None:  # A mixture of experts is a result already.
            return lambda add: operand if add == NONE else self.program.scaled_add(operand, add)
        return lambda add: self.product(linear, operand, add=add)
