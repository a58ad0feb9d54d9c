# SPDX-License-Identifier: Apache-2.0
"""A table of the halves of decoder layers, attention and MLP, with the function that writes each as program steps.

A half is a module between a norm and the residual stream. Its last linear layer adds to the stream, so the function
does not write that layer. It returns the operand and the layer, for ``stream + linear(operand)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowbit.models.fused_attention import FusedAttention
from lowbit.models.lowbit_attention import softcap_program
from lowbit.ops.linear import LinearArgs
from lowbit.ops.program import Program
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_norm import EPS
from lowbit.quant.gated_mlp import GATED_LAYERS, FusedGatedMLP
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged


class Steps(Unchanged):
    """A program under construction. It notes the modules of its steps, so that a later change of one is detected."""

    def __init__(self) -> None:
        super().__init__()
        self.program = Program()
        self.merged = True
        """Whether q, k and v are one product in each layer."""

    def norm(self, norm: nn.Module, x: int, **add: int) -> int:
        """Write the RMSNorm of x."""
        self.note(norm._parameters, "weight")
        self.note(norm.__dict__, "facts", *EPS)
        self.note_module(norm)
        facts = norm.facts
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
        """Note a layer whose weight is part of a step."""
        self.note(linear._parameters, "weight", "bias")
        self.note(linear.__dict__, "op_args", "row_number")
        self.note_module(linear)

    def note_half(self, half: nn.Module) -> None:
        """Note a half that will not be called."""
        self.note(half._modules, *half._modules)
        self.note(half.__dict__, "facts", "training")
        self.note_module(half)


Written = tuple[int, QuantLinear]


def attention_steps(steps: Steps, attention: FusedAttention, i: int, kind: int, x: int) -> Written | None:
    """Write attention, with or without a window: the mask and the cache determine which tokens are visible."""
    projections, o_proj = attention.projections(), attention._modules["o_proj"]
    of_heads = attention.facts["norms"]
    if attention.training or not attention.is_causal or projections is None or hooked(attention, ("o_proj",)):
        return None
    if type(o_proj) is not QuantLinear or not all(norm.weight.is_contiguous() for norm in of_heads):
        return None
    program, facts = steps.program, attention.facts
    cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
    keys, values = Program.state(2 * i), Program.state(2 * i + 1)
    qkv = _projected(steps, facts["merged"], projections, x)
    norms = [program.constant(norm.weight) for norm in of_heads]
    if norms:
        norms += (facts["norm"]["eps"], facts["norm"]["offset"])
    query = program.rope_append(qkv, cos, sin, keys, values, kind, *norms)
    scale, softcap = (facts["options"].get(name) for name in ("scaling", "softcap"))
    scale = attention.head_dim**-0.5 if scale is None else float(scale)
    score_mod = () if softcap is None else softcap_program(float(softcap))
    attended = program.attention(query, keys, values, kind, scale, mask, causal=True, score_mod=score_mod)
    steps.note_half(attention)
    steps.note(attention.__dict__, "is_causal", *facts["noted"].names)
    for norm in of_heads:
        steps.note(norm._parameters, "weight")
        steps.note(norm.__dict__, "facts", *EPS)
        steps.note_module(norm)
    return attended, o_proj


def _projected(steps: Steps, merged: Any, projections: list[QuantLinear], x: int) -> int:
    """Write q, k and v as one product, or as one product each into parts of the same row."""
    if merged.holds(projections):
        steps.note(merged.__dict__, "weight", "bias")
        parameters = (parameter for linear in projections for parameter in (linear.weight, linear.bias))
        steps.note_addresses([parameter for parameter in parameters if parameter is not None])
        for linear in projections:
            steps.note_linear(linear)
        return steps.linear(merged.weight, merged.bias, merged.op_args, projections[0].row_number, x)
    steps.merged = False
    qkv, at = steps.program.columns(x, sum(linear.out_features for linear in projections)), 0
    for linear in projections:
        steps.product(linear, x, into=qkv, first_column=at)
        at += linear.out_features
    return qkv


def gated_mlp_steps(steps: Steps, mlp: FusedGatedMLP, i: int, kind: int, x: int) -> Written | None:
    """Write ``act(gate(x)) * up(x)``."""
    gate, up, down = layers = [mlp._modules[name] for name in GATED_LAYERS]
    activation, act_fn = mlp.activation(), mlp._modules.get("act_fn")
    if mlp.training or activation is None or hooked(mlp, (*GATED_LAYERS, "act_fn")):
        return None
    if any(type(linear) is not QuantLinear for linear in layers):
        return None
    gated = steps.product(up, x, mul=steps.product(gate, x, activation=activation))
    steps.note_half(mlp)
    steps.note(mlp.__dict__, "act_fn")
    steps.note(getattr(mlp.facts["act_fn"], "__dict__", {}), *mlp.facts["noted"].names)
    if act_fn is not None:
        steps.note_module(act_fn)
    return gated, down


HALF_STEPS: dict[type[Fused], Callable[..., Written | None]] = {
    FusedAttention: attention_steps,
    FusedGatedMLP: gated_mlp_steps,
}
"""The class of each kind of half after `lowbit.fuse`, and the function that writes its steps. The function takes the
steps, the module, the index of the layer, its kind of mask and rotary embedding, and the operand x. It returns None if
the module cannot be a step in its current state."""
