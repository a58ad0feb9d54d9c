# SPDX-License-Identifier: Apache-2.0
"""The projections of Qwen3-Next's gated delta nets with their rows in the order of a program's steps.

The rows of ``in_proj_qkvz`` are q, k, v and z of one key head, then those of the next, and those of ``in_proj_ba`` b and
a. A convolution and a delta rule want q of all heads side by side, then k of all heads. So a program has copies of both
weights with their rows in this order: in Qwen3-Next-80B-A3B one weight in 90.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.models.delta_net_forms import Sizes
from lowbit.quant.codes import CodedWeight
from lowbit.quant.merged import MergedLinear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged


class OrderedProjections:
    """Copies of two projections with ordered rows, made again if a projection has changed. A copy of this is empty."""

    def __init__(self) -> None:
        self._layers: list[nn.Module] = []
        self._made_of = Unchanged()
        self.merged = MergedLinear()

    def __reduce__(self) -> Any:
        return type(self), ()

    def of(self, projections: Sequence[Any], sizes: Sizes) -> list[nn.Module]:
        """Return the layers of ``qkvz`` and of ``ba``, whose results are q, k, v and z, and b and a, each of all heads."""
        if not self._made_of.holds():
            note_copied(made_of := Unchanged(), projections)
            values = sizes.heads // sizes.key_heads
            parts = ((sizes.dk, sizes.dk, values * sizes.dv, values * sizes.dv), (values, values))
            orders = [_order(sizes.key_heads, of) for of in parts]
            self._layers = [_in_order(layer, order) for layer, order in zip(projections, orders, strict=True)]
            self._made_of, self.merged = made_of, MergedLinear()
        return self._layers


def note_copied(record: Unchanged, layers: Sequence[Any]) -> None:
    """Record layers of which copies are used."""
    for layer in layers:
        record.note(layer._parameters, *layer._parameters)
        record.note(layer.__dict__, "op_args", "row_number")
        record.note_module(layer)
        for tensor in layer._parameters.values():
            if tensor is not None:
                record.note_contents(tensor)


def cannot_be_ordered(layer: nn.Module) -> bool:
    """Whether the rows of a packed layer have no codes of their own."""
    return type(layer) is QuantLinear and layer.spec.format == SEMI_SPARSE


def _order(groups: int, sizes: Sequence[int]) -> Tensor:
    """Return which rows become the first ones, the next and so on, if a group has parts of these sizes."""
    rows = torch.arange(groups * sum(sizes), device="cpu").view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(list(sizes), dim=1)])


@torch.inference_mode(False)  # a step keeps them for later calls
@torch.no_grad()
def _in_order(layer: Any, order: Tensor) -> nn.Module:
    bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[order], requires_grad=False)
    if type(layer) is QuantLinear:
        packed = CodedWeight.unpack(layer.weight.detach(), layer.stored).rows(order).pack()
        ordered = QuantLinear.from_packed(packed, layer.out_features, layer.in_features, layer.spec, bias)
        ordered.prefer(layer.row)
        return ordered
    copy = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
    copy.weight, copy.bias = nn.Parameter(layer.weight.detach()[order], requires_grad=False), bias
    return copy
