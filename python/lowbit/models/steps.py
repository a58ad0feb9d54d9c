# SPDX-License-Identifier: Apache-2.0
"""A program under construction, and the record of the modules that its steps replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.layer_memory import Memory
from lowbit.ops.linear import LinearArgs
from lowbit.ops.program import NONE, Program
from lowbit.quant.fused_layer_norm import FusedLayerNorm
from lowbit.quant.fused_norm import EPS
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged

MISSING = torch.empty(0, device="cpu")
"""The input of a call that lacks it: a mask, or the ends of packed sequences."""

Written = tuple[int, "QuantLinear | None"]
"""What a half of a layer adds to the residual stream: an operand and the last linear layer of the half, which adds to the
stream itself; or a result and None."""


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

    def keep(self, memory: Memory, kind: int, module: nn.Module) -> list[int]:
        """Record what a module keeps of earlier tokens, and return the operands."""
        first = sum(each.count for each, _, _ in self.memories)
        self.note(module.__dict__, "layer_idx")
        self.memories.append((memory, kind, getattr(module, "layer_idx", None)))
        return [Program.state(first + i) for i in range(memory.count)]

    def norm(self, norm: nn.Module, x: int, **add: int) -> int:
        """Write the norm of x."""
        self.note(norm._parameters, "weight", "bias")
        self.note(norm.__dict__, "facts", *EPS)
        self.note_module(norm)
        facts = norm.facts
        if norm.piece is FusedLayerNorm:
            operands = map(self.program.constant, norm.operands())
            return self.program.layer_norm(x, *operands, facts["eps"], facts["offset"], **add)
        return self.program.rms_norm(x, self.program.constant(norm.weight), facts["eps"], facts["offset"], **add)

    def product(self, linear: QuantLinear, x: int, **more: Any) -> int:
        """Write a quantized linear layer applied to x."""
        self.note_linear(linear)
        return self.linear(linear.weight, linear.bias, linear.op_args, linear.row_number, x, **more)

    def linear(self, weight: Tensor, bias: Tensor | None, op_args: LinearArgs, row: int, x: int, **more: Any) -> int:
        """Write the product of x and this packed weight."""
        constant = self.program.constant
        return self.program.linear(x, constant(weight), op_args, constant(bias), row=row, **more)

    def note_linear(self, linear: QuantLinear) -> None:
        """Record a layer whose weight is part of a step."""
        self.note(linear._parameters, "weight", "bias")
        self.note(linear.__dict__, "op_args", "row_number")
        self.note_module(linear)

    def note_half(self, half: nn.Module) -> None:
        """Record a half, which the program replaces."""
        self.note(half._modules, *half._modules)
        self.note(half.__dict__, "facts", "training")
        self.note_module(half)
