# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder as a program, kept for as long as the layers do not change.

    h = x + n1(o(attention(rope_append(qkv(n0(x))))));  y = h + n3(down(act(gate(n2(h))) * up(n2(h))))

n0 and n2 are rms_norm; so are n1 and n3 in a layer of four norms (Gemma), and nothing in one of two. y is x
of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.spec import OpArgs
from lowbit.integrations.lowbit_attention import softcap_program
from lowbit.ops.program import Program
from lowbit.ops.run_program import KeptProgram
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_norm import EPS
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged

_OF_MLP = ("gate_proj", "up_proj", "down_proj")


class LayerProgram(Unchanged):
    """The program; ``fit`` says whether there is one: not where something stands between a module and its call. It
    refers to no layer: one of them may hold it.

    Its inputs are x, then cos, sin and mask of each kind of layer; its states the keys and values of each layer; its
    starts the tokens in the caches of each kind.

    Args:
        layers: fused ones.
        kinds: a number for each; layers of one have the same mask and rotary embedding.
        dtype: of activations and norms.
    """

    def __init__(
        self, layers: Sequence[Fused] = (), kinds: Sequence[int] = (), dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.norms: list[Tensor] = []
        self.merged = True
        """Whether q, k and v are one product in each layer."""
        self.run: KeptProgram | None = None
        self._program = Program()
        x: int | None = Program.input(0)
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            x = self._add(layer, i, kind, x)
            if x is None:
                return
        if layers:
            self.run = KeptProgram(self._program)

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether there is a program for activations of this dtype, of the layers as they are now."""
        return (
            self.run is not None and self.dtype is dtype and self.holds()
            and all([norm.dtype is dtype for norm in self.norms])  # `.to()` may leave a parameter the same object
        )  # fmt: skip

    @property
    def fit(self) -> bool:
        return self.run is not None

    def _add(self, layer: Fused, i: int, kind: int, x: int) -> int | None:
        """Write the steps of a layer and return its result; None if it is not as it was fused."""
        if not isinstance(layer, Fused):  # since `unfuse`, as its pieces may be
            return None
        facts, modules = layer.facts, layer._modules
        if any(modules[name] is not module or not isinstance(module, Fused) for name, module in facts["children"]):
            return None
        attention, mlp = modules["self_attn"], modules["mlp"]
        if hooked(layer, modules) or hooked(attention, ("o_proj",)) or hooked(mlp, (*_OF_MLP, "act_fn")):
            return None
        norms = [modules[name] for name in facts["norms"]]
        activation = mlp.activation()
        if layer.training or mlp.training or activation is None or not all(norm.is_as_fused() for norm in norms):
            return None
        projections = attention.projections()
        o_proj, *of_mlp = others = [attention._modules["o_proj"], *(mlp._modules[name] for name in _OF_MLP)]
        if attention.training or not attention.is_causal or projections is None:
            return None
        if any(type(linear) is not QuantLinear for linear in others):
            return None
        of_heads = attention.facts["norms"]
        if any(norm.weight.dtype is not self.dtype for norm in norms):
            return None
        if not all(norm.weight.is_contiguous() for norm in (*norms, *of_heads)):
            return None
        self.norms += (norm.weight for norm in norms)
        behind = len(norms) // 2  # the norm of the second half
        attended = self._attention(attention, projections, i, kind, self._norm(norms[0], x))
        h = self._branch(o_proj, norms[1] if behind == 2 else None, attended, x)
        gate, up, down = of_mlp
        second = self._norm(norms[behind], h)
        gated = self._product(up, second, mul=self._product(gate, second, activation=activation))
        y = self._branch(down, norms[3] if behind == 2 else None, gated, h)
        self._note(layer, attention, mlp, [*norms, *of_heads], [*projections, *others])
        return y

    def _norm(self, norm: nn.Module, x: int, **add: int) -> int:
        facts = norm.facts
        return self._program.rms_norm(x, self._program.constant(norm.weight), facts["eps"], facts["offset"], **add)

    def _branch(self, linear: QuantLinear, norm: nn.Module | None, x: int, add: int) -> int:
        if norm is None:
            return self._product(linear, x, add=add)
        return self._norm(norm, self._product(linear, x), add=add)

    def _product(self, linear: QuantLinear, x: int, **more: Any) -> int:
        return self._linear(*_product_of(linear), x, **more)

    def _linear(self, weight: Tensor, bias: Tensor | None, op_args: OpArgs, row: int, x: int, **more: Any) -> int:
        constant = self._program.constant
        return self._program.linear(x, constant(weight), op_args, constant(bias), row=row, **more)

    def _attention(self, attention: nn.Module, projections: list[QuantLinear], i: int, kind: int, x: int) -> int:
        program, facts = self._program, attention.facts
        cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
        keys, values = Program.state(2 * i), Program.state(2 * i + 1)
        qkv = self._projected(facts["merged"], projections, x)
        of_heads = [program.constant(norm.weight) for norm in facts["norms"]]
        if of_heads:
            of_heads += (facts["norm"]["eps"], facts["norm"]["offset"])
        query = program.rope_append(qkv, cos, sin, keys, values, kind, *of_heads)
        scale, softcap = (facts["options"].get(name) for name in ("scaling", "softcap"))
        return program.attention(
            query,
            keys,
            values,
            kind,
            attention.head_dim**-0.5 if scale is None else float(scale),
            mask,
            causal=True,
            score_mod=() if softcap is None else softcap_program(float(softcap)),
        )

    def _projected(self, merged: Any, projections: list[QuantLinear], x: int) -> int:
        if merged.holds(projections):
            self.note(merged.__dict__, "weight", "bias")
            parameters = (parameter for linear in projections for parameter in (linear.weight, linear.bias))
            self.note_addresses([parameter for parameter in parameters if parameter is not None])
            return self._linear(merged.weight, merged.bias, merged.op_args, projections[0].row_number, x)
        self.merged = False
        qkv, at = self._program.columns(x, sum(linear.out_features for linear in projections)), 0
        for linear in projections:
            self._product(linear, x, into=qkv, first_column=at)
            at += linear.out_features
        return qkv

    def _note(
        self, layer: nn.Module, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module], linears: list[QuantLinear]
    ) -> None:
        for module in (layer, attention, mlp):
            self.note(module._modules, *module._modules)
        for module in (attention, mlp):
            self.note(module.__dict__, "facts", "training")
        self.note(attention.__dict__, "is_causal", *attention.facts["noted"].names)
        self.note(mlp.__dict__, "act_fn")
        self.note(layer.__dict__, "training")
        for norm in norms:
            self.note(norm._parameters, "weight")
            self.note(norm.__dict__, "facts", *EPS)
        for linear in linears:
            self.note(linear._parameters, "weight", "bias")
            self.note(linear.__dict__, "op_args", "row_number")
        act_fn = mlp._modules.get("act_fn")
        self.note(getattr(mlp.facts["act_fn"], "__dict__", {}), *mlp.facts["noted"].names)
        for module in (attention, mlp, *norms, *linears, *([] if act_fn is None else [act_fn])):
            self.note_module(module)


def _product_of(linear: QuantLinear) -> tuple[Tensor, Tensor | None, OpArgs, int]:
    return linear.weight, linear.bias, linear.op_args, linear.row_number
