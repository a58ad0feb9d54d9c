# SPDX-License-Identifier: Apache-2.0
"""Several QuantLinear layers with the same input, multiplied as one: x is read and rounded once, in one parallel
region.

Their packed weights are concatenated in one tensor, and each layer's weight becomes a view of it. Names, state dict and
memory therefore stay the same, and each layer can still be called alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.ops.linear import linear
from lowbit.quant.quant_linear import QuantLinear

_PANEL = 16
"""Outputs of a panel: a layer of another multiple ends within one."""


class MergedLinear:
    """The layers as one product, where their formats allow it. It knows when their weights went elsewhere (``.to()``, a
    state dict that was assigned), and merges them again."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, layers: Sequence[QuantLinear], x: Tensor) -> Tensor:
        """Return the results of the layers behind one another, ``[..., n of all]``."""
        if not self.holds(layers):
            return torch.cat([layer(x) for layer in layers], dim=-1)
        return linear(x, self.weight, self.op_args, self.bias, row=layers[0].row_number)

    def holds(self, layers: Sequence[QuantLinear]) -> bool:
        """Whether ``weight``, ``bias`` and ``op_args`` are those of these layers: they are merged if they can be."""
        if self._is_of(layers):
            return True
        if len(layers) == 1:
            self.op_args, self.weight, self.bias = layers[0].op_args, layers[0].weight, layers[0].bias
        elif _can_be_one(layers):
            self._merge(layers)
        else:
            return False
        return True

    def _is_of(self, layers: Sequence[QuantLinear]) -> bool:
        """Whether each weight and bias still is the part of the whole that it was made to be. As long as the whole is
        held here, nothing else can be given its memory."""
        if self.weight is None:
            return False
        at, whole_bias = self.weight.data_ptr(), self.bias
        bias_at = 0 if whole_bias is None else whole_bias.data_ptr()
        for layer in layers:
            parameters = layer._parameters
            weight, bias = parameters["weight"], parameters["bias"]
            if weight.data_ptr() != at or (0 if bias is None else bias.data_ptr()) != bias_at:
                return False
            at += weight.nbytes
            bias_at += 0 if bias is None else bias.nbytes
        return True

    @torch.inference_mode(False)  # the parameters become views, and a later call may want a gradient
    @torch.no_grad()
    def _merge(self, layers: Sequence[QuantLinear]) -> None:
        self.op_args = (sum(layer.out_features for layer in layers), *layers[0].op_args[1:])
        parameters = [layer._parameters for layer in layers]  # a layer that becomes float meanwhile gets another dict
        weights = [inside["weight"] for inside in parameters]
        if any(weight.dtype != torch.uint8 for weight in weights):
            raise RuntimeError("a layer became float while its weight was joined to others")
        whole = torch.cat([weight.data for weight in weights])
        for inside, view in zip(parameters, whole.split([len(weight) for weight in weights]), strict=True):
            # Not its .data: a kernel that another thread runs may read the old memory, which its Parameter holds.
            inside["weight"] = torch.nn.Parameter(view, requires_grad=False)
        self.weight = whole
        self.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])


def _can_be_one(layers: Sequence[QuantLinear]) -> bool:
    first = layers[0]
    return all(
        layer.op_args[1:] == first.op_args[1:]  # in_features and format
        and layer.out_features % _PANEL == 0
        and (layer.bias is None) == (first.bias is None)
        and (layer.bias is None or layer.bias.dtype == first.bias.dtype)
        and layer.row == first.row
        for layer in layers
    )


def _joined(parts: Sequence[torch.nn.Parameter]) -> Tensor:
    """The parts behind one another in new memory, of which each becomes a view."""
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return whole
