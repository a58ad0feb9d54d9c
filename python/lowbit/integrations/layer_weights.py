# SPDX-License-Identifier: Apache-2.0
"""The weights of layers as the op decoder_layers takes them, kept for as long as the layers do not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowbit.formats.spec import OpArgs
from lowbit.quant.fused import Fused, hooked
from lowbit.quant.fused_norm import EPS
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged

_OF_MLP = ("gate_proj", "up_proj", "down_proj")


class LayerWeights(Unchanged):
    """Lists of the layers' weights and numbers, in the order of the op; ``fit`` says whether they are complete: not
    where something stands between a module and its call. It refers to no layer: one of them may hold it."""

    def __init__(self, layers: Sequence[Fused] = (), dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.norms: list[Tensor] = []
        self.head_norms: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.linears: list[int] = []
        self.merged = True
        """Whether q, k and v are one product in each layer."""
        self.fit = bool(layers) and all(self._add(layer) for layer in layers)

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether they are complete for activations of this dtype, as the layers are now."""
        return (
            self.fit and self.dtype is dtype and self.holds()
            and all([norm.dtype is dtype for norm in self.norms])  # `.to()` may leave a parameter the same object
        )  # fmt: skip

    def _add(self, layer: Fused) -> bool:
        if not isinstance(layer, Fused):  # since `unfuse`, as its pieces may be
            return False
        facts, modules = layer.facts, layer._modules
        if any(modules[name] is not module or not isinstance(module, Fused) for name, module in facts["children"]):
            return False
        attention, mlp = modules["self_attn"], modules["mlp"]
        if hooked(layer, modules) or hooked(attention, ("o_proj",)) or hooked(mlp, (*_OF_MLP, "act_fn")):
            return False
        norms = [modules[name] for name in facts["norms"]]
        if layer.training or mlp.training or mlp.activation() != facts["same"]["activation"]:
            return False
        if not all(norm.is_as_fused() for norm in norms):
            return False
        projections = attention.projections()
        others = [attention._modules["o_proj"], *(mlp._modules[name] for name in _OF_MLP)]
        if attention.training or not attention.is_causal or projections is None:
            return False
        if any(type(linear) is not QuantLinear for linear in others):
            return False
        self.norms += (norm.weight for norm in norms)
        self.head_norms += (norm.weight for norm in attention.facts["norms"])
        self._add_products(attention, projections, others)
        self._note(layer, attention, mlp, [*norms, *attention.facts["norms"]], [*projections, *others])
        return all(norm.weight.dtype is self.dtype for norm in norms)

    def _add_products(self, attention: nn.Module, projections: list[QuantLinear], others: list[QuantLinear]) -> None:
        merged = attention.facts["merged"]
        if merged.holds(projections):
            products = [(merged.weight, merged.bias, merged.op_args, projections[0].row_number)]
            self.note(merged.__dict__, "weight", "bias")
            parameters = (parameter for linear in projections for parameter in (linear.weight, linear.bias))
            self.note_addresses([parameter for parameter in parameters if parameter is not None])
        else:
            products = list(map(_product_of, projections))
            self.merged = False
        self.linears.append(len(products))
        for weight, bias, op_args, row in (*products, *map(_product_of, others)):
            self.weights += (weight,) if bias is None else (weight, bias)
            self.linears += (*op_args, row, bias is not None)

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
