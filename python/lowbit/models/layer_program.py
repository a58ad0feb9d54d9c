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
from lowbit.models.growing_cache import GrowingLayer, GrowingSlidingLayer, growing_layers, new_tokens
from lowbit.models.half_steps import HALF_STEPS, cross_attention_steps
from lowbit.models.layer_joins import Sums
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

    The inputs are x, then cos, sin and mask for each kind of layer. The states are the keys and values of each layer.
    The starts are the numbers of tokens in the caches of each kind. A program of several layers runs without calling
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
    """

    def __init__(
        self,
        layers: Sequence[Fused] = (),
        kinds: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        end: Callable[[Any, int], int | None] | None = None,
        causal: bool = True,
        crosses: bool = False,
    ) -> None:
        super().__init__(dtype)
        self.causal = causal
        if not causal:
            self.cu_seqlens = Program.input(1 + 3 * len(set(kinds)))
        if crosses:
            self.cross_states, self.cross_mask = 2 * len(layers), Program.input(1 + 3 * len(set(kinds)))
        self.norms: list[Tensor] = []
        self.half_rotary = False
        """Whether cos and sin of the model have one column for two of a head."""
        self._kinds = kinds
        self._indices: list[int | None] = []
        """The cache index of each layer."""
        self._heads: list[tuple[int, int]] = []
        """The number of key heads and the head size of each layer."""
        x: int | None = Program.input(0)
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            if len(layers) > 1 and has_hooks(layer):
                x = None
            x = None if x is None else self._layer(layer, i, kind, x)
            if len(layers) > 1:
                self.note_module(layer)
        if end is not None and x is not None:
            x = end(self, x)
        self.run = KeptProgram(self.program) if layers and x is not None else None

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the program is valid for the layers in their current state and for activations of this dtype."""
        return (
            self.run is not None and self.dtype is dtype and self.holds()
            and all(map(is_, map(_dtype_of, self.norms), repeat(dtype)))  # `.to()` may keep the object
        )  # fmt: skip

    def places(
        self, x: Tensor, cache: Any, length: int | None = None
    ) -> tuple[Sequence[GrowingLayer | GrowingSlidingLayer], list[Tensor], list[int]] | None:
        """Return the memory for the keys and values of the new tokens ``x [B, L, k]``.

        The result has the layers of the cache, whose `extend` counts the tokens, and the states and starts of the
        program. The memory has space for ``length`` tokens, by default L. Without a cache, it is new. The result is
        None if tokens can be added to this cache only through its ``update``.
        """
        batch, length = x.shape[0], x.shape[1] if length is None else length
        if cache is None:
            made = [x.new_empty(2, batch, heads, length, size).unbind() for heads, size in self._heads]
            return (), [*chain.from_iterable(made)], [0] * len(set(self._kinds))
        grown = growing_layers(cache, self._indices)
        if grown is None or len(set(map(id, grown))) < len(grown):  # two layers would write to one cache layer
            return None
        new = {heads: new_tokens(batch, *heads, x) for heads in set(self._heads)}
        found = [layer.room_for(length, new[heads], x) for layer, heads in zip(grown, self._heads, strict=True)]
        if None in found:
            return None
        keys, values, starts = zip(*found, strict=True)
        of_kinds = dict(zip(self._kinds, starts, strict=True))
        if starts != tuple(map(of_kinds.get, self._kinds)):
            return None
        return grown, [*chain.from_iterable(zip(keys, values, strict=True))], list(of_kinds.values())

    def memory(self, x: Tensor) -> list[Tensor]:
        """Return the states of an encoder's program for ``x [B, L, k]``: memory for keys and values, which layers with
        the same heads share, or nothing if no step writes them."""
        if not self.has_states:
            return []
        batch, length, _ = x.shape
        made = {(heads, size): x.new_empty(2, batch, heads, length, size).unbind() for heads, size in set(self._heads)}
        return [*chain.from_iterable(map(made.__getitem__, self._heads))]

    def takes_norm(self, norm: nn.Module) -> bool:
        """Whether a norm can be a step: it is unchanged since it was fused and has the dtype. `serves` checks the dtype
        again in each call."""
        weights = [weight for weight in norm._parameters.values() if weight is not None]
        if not norm.is_as_fused() or not all(w.dtype is self.dtype and w.is_contiguous() for w in weights):
            return False
        self.norms += weights
        return True

    def _layer(self, layer: Fused, i: int, kind: int, x: int) -> int | None:
        """Write the steps of a layer and return its result, or None if the layer has changed since it was fused."""
        if not isinstance(layer, Fused):  # `unfuse` was called
            return None
        facts = layer.facts
        if not self._note_structure(layer) or (facts["joins"].clamps and self.dtype is torch.float16):
            return None
        attention = submodule_at(layer, facts["attention_name"])
        if attention.facts["rotates"]:
            if self.rotates and self.half_rotary != attention.facts["half_rotary"]:
                return None
            self.half_rotary = attention.facts["half_rotary"]
        self.note(attention.__dict__, "layer_idx")
        self._indices.append(getattr(attention, "layer_idx", None))
        self._heads.append((attention.facts["kv_heads"], attention.facts["head_dim"]))
        joins, sums = facts["joins"], Sums(self.program, x)
        for join in joins.pieces:
            piece, number = submodule_at(layer, join.name), facts["activations"].get(join.name)
            if number is None:
                write = self._writer(piece, i, kind, sums.of(join.terms), join.crosses)
            else:  # of a linear layer, which computes it too
                of = joins.pieces[join.terms[0][1] - 1]
                linear, given = submodule_at(layer, of.name), sums.of(of.terms)
                write = partial(self._activated, linear, given, number)
                self.note_module(piece)
            if write is None:
                return None
            sums.append(write)
        return sums.of(joins.result)

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
