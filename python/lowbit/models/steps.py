# SPDX-License-Identifier: Apache-2.0
"""A program under construction, and the record of the modules that its steps replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.adapter_factors import Added, factors_of_all, low_rank_of, packed
from lowbit.models.layer_memory import Memory
from lowbit.ops.linear import LinearArgs
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused_layer_norm import FusedLayerNorm
from lowbit.quant.fused_norm import EPS
from lowbit.quant.lora_layers import base_of, note_lora
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged

MISSING = torch.empty(0, device="cpu")
"""The input of a call that lacks it: a mask, or the ends of packed sequences."""

Written = tuple[int, "nn.Module | None"]
"""What a half of a layer adds to the residual stream: an operand and the last linear layer of the half, which adds to the
stream itself, a `QuantLinear` or LoRA over one; or a result and None."""


class Steps(Unchanged):
    """A program under construction. It records the modules of its steps, so that a later change to one is detected.

    Args:
        dtype: the dtype of activations.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.program = Program()
        self.merged = True
        """Whether q, k and v are one product in each layer."""
        self.rotates = False
        """Whether a step reads cos and sin."""
        self.half_rotary = False
        """Whether cos and sin of the model have one column for two of a head."""
        self.of_token = False
        """Whether each call has one token behind others."""
        self.memories: list[tuple[Memory, int, int | None]] = []
        """What each attention and each recurrent layer keeps of earlier tokens, the kind of its decoder layer, and its
        index in the cache."""
        self.causal = True
        """Whether a token sees those before it alone, where no mask is given."""
        self.cu_seqlens = NONE
        """The operand with the ends of packed sequences."""
        self.cross_states = 0
        """The index of the first state that is keys or values of an encoder's result."""
        self.cross_mask = NONE
        """The operand with the mask of an encoder's result."""
        self.weights: list[Tensor] = []
        """The packed weights of layers, without their adapters."""
        self.norms: list[Tensor] = []
        """The weights of norms, which have the dtype of activations."""

    def keep(self, memory: Memory, kind: int, module: nn.Module, index: int | None = None) -> list[int]:
        """Record what a module keeps of earlier tokens in the layer ``index`` of the cache, by default the one that it
        names, and return the operands."""
        first = sum(each.count for each, _, _ in self.memories)
        self.note(module.__dict__, "layer_idx")
        self.memories.append((memory, kind, getattr(module, "layer_idx", None) if index is None else index))
        return [Program.state(first + i) for i in range(memory.count)]

    def takes_rotation(self, half_rotary: bool) -> bool:
        """Whether a step can read cos and sin of this form: those before it read no other."""
        fits = not self.rotates or self.half_rotary == half_rotary
        self.rotates, self.half_rotary = True, half_rotary
        return fits

    def takes_norm(self, norm: nn.Module) -> bool:
        """Whether a norm can be a step: it is unchanged since it was fused and has the dtype. `serves` of a program
        checks the dtype again in each call."""
        weights = [weight for weight in norm._parameters.values() if weight is not None]
        if not norm.is_as_fused() or not all(w.dtype is self.dtype and w.is_contiguous() for w in weights):
            return False
        self.norms += weights
        return True

    def note_norm(self, norm: nn.Module) -> None:
        """Record a norm that a step computes."""
        self.note(norm._parameters, "weight", "bias")
        self.note(norm.__dict__, "facts", *EPS)
        self.note_module(norm)

    def norm(self, norm: nn.Module, x: int, **add: int) -> int:
        """Write the norm of x."""
        self.note_norm(norm)
        facts = norm.facts
        if norm.piece is FusedLayerNorm:
            operands = map(self.program.constant, norm.operands())
            return self.program.layer_norm(x, *operands, facts["eps"], facts["offset"], **add)
        return self.program.rms_norm(x, self.program.constant(norm.weight), facts["eps"], facts["offset"], **add)

    def product(self, layer: nn.Module, x: int, **more: Any) -> int:
        """Write a quantized linear layer, or LoRA over one, applied to x."""
        (added,) = self.adapters((layer,), x)
        return self.product_with(added, layer, x, **more)

    def product_with(self, added: Added | None, layer: nn.Module, x: int, **more: Any) -> int:
        """Write a layer whose adapter is among those of `adapters`."""
        linear = base_of(layer)
        self.note_linear(linear)
        return self.linear(linear.W_q, linear.bias, linear.op_args, linear.row_number, x, [added], **more)

    def adapters(self, layers: Sequence[nn.Module], x: int) -> list[Added | None]:
        """Write the first factors of the adapters on these layers, which all read x, as one product. Return what each
        layer adds."""
        for layer in layers:
            note_lora(self, layer)
        down, ups = factors_of_all(layers)
        if down is None:
            return [None] * len(layers)
        weight, op_args = packed(down)
        inner = self.linear(weight, None, op_args, 0, x)
        return [Added(inner, column, up) for column, up in ups]

    def halves(self, layer: nn.Module, x: int) -> list[Added | None]:
        """Write the first factors of the adapters on a layer; return what its two halves of outputs add."""
        (added,) = self.adapters((layer,), x)
        return [None, None] if added is None else [added._replace(up=up) for up in added.up.chunk(2)]

    def side_by_side(self, parts: Sequence[tuple[int, int]]) -> int:
        """Write a copy of operands, each with its number of columns, beside each other."""
        whole, at = self.program.columns(parts[0][0], sum(count for _, count in parts)), 0
        for part, count in parts:
            self.program.heads(part, 1, count, 0, count, whole, at)
            at += count
        return whole

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        op_args: LinearArgs,
        row: int,
        x: int,
        added: Sequence[Added | None] = (),
        **more: Any,
    ) -> int:
        """Write the product of x and this packed weight, with what adapters add to parts of its outputs."""
        constant = self.program.constant
        low_rank = low_rank_of(self.program, added)
        return self.program.linear(x, constant(weight), op_args, constant(bias), row=row, low_rank=low_rank, **more)

    def note_linear(self, linear: QuantLinear) -> None:
        """Record a layer whose weight is part of a step."""
        self.weights.append(linear.W_q)
        self.note(linear._parameters, "weight", "bias")
        self.note(linear.__dict__, "op_args", "row_number")
        self.note_module(linear)

    def note_half(self, half: nn.Module) -> None:
        """Record a half, which the program replaces."""
        self.note(half._modules, *half._modules)
        self.note(half.__dict__, "facts", "training")
        self.note_module(half)


class KeptPrograms:
    """The programs of a module in the states that it had last, the last one first. Those of other weights are let go, so
    these are states of its adapters: to switch back to one takes no writing. A copy is empty."""

    MOST = 4

    def __init__(self) -> None:
        self._programs: list[Any] = []

    def __reduce__(self) -> Any:
        return type(self), ()

    def serving(self, serves: Callable[[Any], bool], write: Callable[[], Any]) -> Any:
        """Return a program for which ``serves`` holds, or else what ``write`` returns."""
        programs = self._programs
        program = next(filter(serves, programs), None)
        if program is None:
            program = write()
            programs = [other for other in programs if _are_same(other.weights, program.weights)][: self.MOST - 1]
        if not programs or program is not programs[0]:
            self._programs = [program, *(other for other in programs if other is not program)]
        return program


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
