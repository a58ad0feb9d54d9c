# SPDX-License-Identifier: Apache-2.0
"""The names that models of transformers give to the parts of a gated delta net:

q, k, v = silu(conv1d(qkv(x)));  o = gated_delta_rule(q, k, v, g(x), beta(x));  y = out(norm(o, z(x)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.quant.merged import PANEL, MergedLinear
from lowbit.quant.quant_linear import QuantLinear

CONV = "conv1d"
_APART = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Form:
    """The names of the children of a gated delta net.

    Args:
        of_qkv: the linear layers whose results, side by side, are q, k and v.
        others: the other linear layers that read x: of z, of b and, without ``decay``, of a. Where ``in_groups``, the
            first layer gives q, k, v and z of each key head and the second one b and a; the module's
            ``fix_query_key_value_ordering`` orders them.
        norm, out: the gated norm and the output projection.
        behind_z: the linear layer that makes z of the result of its reader (a gate of low rank), or "".
        decay: the module that makes g of x; "" if g is made of a, ``A_log`` and ``dt_bias``.
    """

    of_qkv: tuple[str, ...]
    others: tuple[str, ...]
    norm: str
    out: str
    behind_z: str = ""
    decay: str = ""
    in_groups: bool = False

    @property
    def readers(self) -> tuple[str, ...]:
        return self.of_qkv + self.others

    @property
    def children(self) -> set[str]:
        return {*self.readers, self.norm, self.out, self.behind_z, self.decay, CONV} - {""}


FORMS = (
    Form(("in_proj_qkv",), ("in_proj_z", "in_proj_b", "in_proj_a"), "norm", "out_proj"),  # Qwen3.5
    Form(("in_proj_qkvz",), ("in_proj_ba",), "norm", "out_proj", in_groups=True),  # Qwen3-Next
    Form(_APART, ("g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),  # OLMo-hybrid
    Form(_APART, ("g_proj", "b_proj"), "o_norm", "o_proj", decay="forget_gate"),  # Bailing-hybrid
    Form(_APART, ("g_a_proj", "b_proj"), "o_norm", "o_proj", behind_z="g_b_proj", decay="forget_gate"),  # Kimi-Linear
)

CHILDREN = [form.children for form in FORMS]
"""The names of the children of modules that may be gated delta nets."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The heads of a gated delta net and their sizes."""

    key_heads: int
    heads: int
    dk: int
    dv: int

    @property
    def columns(self) -> list[int]:
        """The numbers of columns of q, k and v."""
        return [self.key_heads * self.dk, self.key_heads * self.dk, self.heads * self.dv]


_NAMES_OF_SIZES = (
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "num_heads", "head_dim", "head_dim"),
)


def form_of(module: nn.Module) -> Form:
    """Return the form whose children a module has that may be a gated delta net."""
    return FORMS[CHILDREN.index(set(module._modules))]


def sizes_of(module: nn.Module) -> Sizes | None:
    """Return what the attributes of the module say of its heads."""
    for names in _NAMES_OF_SIZES:
        values = [getattr(module, name, None) for name in names]
        if all(isinstance(value, int) and value > 0 for value in values):
            return Sizes(*values)
    return None


def projected(module: Any, form: Form, merged: MergedLinear, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return qkv ``[B, T, C]``, z ``[B, T, ...]``, g ``[B, T, Hv]`` or ``[B, T, Hv, Dk]``, and b ``[B, T, Hv]``."""
    modules = module._modules
    results = _products(merged, [modules[name] for name in form.readers], len(form.of_qkv), x)
    if form.in_groups:
        *qkv, z, b, a = module.fix_query_key_value_ordering(*results)
        results = [torch.cat([part.flatten(2) for part in qkv], dim=-1), z, b, a]
    qkv, z, b, *rest = results
    if form.behind_z:
        z = modules[form.behind_z](z)
    if form.decay:
        return qkv, z, modules[form.decay](x), b
    parameters = module._parameters
    speed = functional.softplus(rest[0].float() + parameters["dt_bias"])
    return qkv, z, -parameters["A_log"].float().exp() * speed, b


def _products(merged: MergedLinear, layers: Sequence[nn.Module], first: int, x: Tensor) -> list[Tensor]:
    """Return the results of the layers, of the ``first`` of them side by side. Leading packed layers of one format are
    one product."""
    packed = list(takewhile(is_of_whole_panels, layers))
    if len(packed) >= first and len(packed) > 1 and merged.holds(packed):
        widths = [layer.out_features for layer in packed]
        joined = merged(packed, x).split([sum(widths[:first]), *widths[first:]], dim=-1)
        return [*joined, *(layer(x) for layer in layers[len(packed) :])]
    results = [layer(x) for layer in layers]
    return [torch.cat(results[:first], dim=-1) if first > 1 else results[0], *results[first:]]


def is_of_whole_panels(layer: nn.Module) -> bool:
    """Whether a packed layer can be joined to others."""
    return type(layer) is QuantLinear and layer.out_features % PANEL == 0
