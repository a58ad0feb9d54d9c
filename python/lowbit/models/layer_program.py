# SPDX-License-Identifier: Apache-2.0
"""A program that computes decoder layers. It is kept as long as the layers do not change.

    h = x + n1(o(attention(rope_append(qkv(n0(x))))));  y = h + n3(down(act(gate(n2(h))) * up(n2(h))))

n0 and n2 are rms_norm. n1 and n3 are rms_norm in a layer with four norms (Gemma) and the identity in a layer with two.
y is the x of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.decoder_pieces import HALVES
from lowbit.models.growing_cache import GrowingLayer, GrowingSlidingLayer, growing_layers, new_tokens
from lowbit.models.half_steps import HALF_STEPS, Steps
from lowbit.ops.program import Program
from lowbit.ops.run_program import KeptProgram
from lowbit.quant.fused import Fused, has_hooks, hooked

_dtype_of = attrgetter("dtype")


class LayerProgram(Steps):
    """The program of one or more decoder layers. ``run`` executes it; ``run`` is None if the layers cannot be a
    program, for instance because one has a hook. The object refers to no layer, because a layer may hold it.

    The inputs are x, then cos, sin and mask of each kind of layer. The states are the keys and values of each layer.
    The starts are the numbers of tokens in the caches of each kind. A program of several layers runs without calling
    them, so their hooks count; a program of one layer runs inside its call.

    Args:
        layers: the fused layers.
        kinds: one number per layer; layers of one kind have the same mask and rotary embedding.
        dtype: the dtype of activations and norms.
        end: writes the steps after the layers. It gets the program and the last result and returns the new result, or
            None if it cannot write them.
    """

    def __init__(
        self,
        layers: Sequence[Fused] = (),
        kinds: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        end: Callable[[Any, int], int | None] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.norms: list[Tensor] = []
        self._kinds = kinds
        self._indices: list[int | None] = []
        """The cache index of each layer."""
        self._heads: list[tuple[int, int]] = []
        """The number of key heads and their size, for each layer."""
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
        """Whether the program is valid for the layers in their current state and activations of this dtype."""
        return (
            self.run is not None and self.dtype is dtype and self.holds()
            and all(map(is_, map(_dtype_of, self.norms), repeat(dtype)))  # `.to()` may keep the object
        )  # fmt: skip

    def places(
        self, x: Tensor, cache: Any, length: int | None = None
    ) -> tuple[Sequence[GrowingLayer | GrowingSlidingLayer], list[Tensor], list[int]] | None:
        """Return the memory for the keys and values of the new tokens ``x [B, L, k]``: the layers of the cache, which
        count the tokens by `extend`, and the states and starts of the program. The memory holds ``length`` tokens, by
        default L. Without a cache, it is new. Return None if this cache takes tokens only through its ``update``."""
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

    def takes_norm(self, norm: nn.Module) -> bool:
        """Whether a norm can be a step: it is unchanged since it was fused and has the dtype. `serves` checks the dtype
        in each call."""
        weight = norm.weight
        if not norm.is_as_fused() or weight.dtype is not self.dtype or not weight.is_contiguous():
            return False
        self.norms.append(weight)
        return True

    def _layer(self, layer: Fused, i: int, kind: int, x: int) -> int | None:
        """Write the steps of a layer and return its result, or None if the layer has changed since it was fused."""
        if not isinstance(layer, Fused):  # `unfuse` was called
            return None
        facts, modules = layer.facts, layer._modules
        if any(modules[name] is not module or not isinstance(module, Fused) for name, module in facts["children"]):
            return None
        norms = [modules[name] for name in facts["norms"]]
        if layer.training or hooked(layer, modules) or not all(map(self.takes_norm, norms)):
            return None
        self.note(modules, *modules)
        self.note(layer.__dict__, "training")
        attention = modules["self_attn"]
        self.note(attention.__dict__, "layer_idx")
        self._indices.append(attention.layer_idx)
        self._heads.append((attention.facts["kv_heads"], attention.head_dim))
        count = len(norms) // len(HALVES)
        for j, name in enumerate(HALVES):
            before, *behind = norms[count * j : count * (j + 1)]
            written = HALF_STEPS[modules[name].piece](self, modules[name], i, kind, self.norm(before, x))
            if written is None:
                return None
            x = self._added(*written, behind, x)
        return x

    def _added(self, operand: int, linear: nn.Module, behind: Sequence[nn.Module], x: int) -> int:
        """``x + linear(operand)``, or ``x + norm(linear(operand))`` if ``behind`` has a norm."""
        if not behind:
            return self.product(linear, operand, add=x)
        return self.norm(behind[0], self.product(linear, operand), add=x)
