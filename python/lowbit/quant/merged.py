# SPDX-License-Identifier: Apache-2.0
"""Several QuantLinear that get the same input, multiplied as one: x is read and rounded once, in one parallel region.

Their packed weights lie behind one another in one tensor, of which each layer's weight becomes a view. So names, state
dict and memory stay as they are, and each layer can still be called alone.
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
    """The layers as one product. It knows when their weights went elsewhere (``.to()``, a state dict that was
    assigned), and merges them again."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    @staticmethod
    def refuses(layers: Sequence[QuantLinear]) -> str:
        """Why the layers cannot be one product; or nothing."""
        first = layers[0]
        for layer in layers:
            if layer.spec != first.spec or layer.in_features != first.in_features:
                return "weights of different formats"
            if layer.out_features % _PANEL:
                return f"{layer.out_features} outputs, which is no multiple of {_PANEL}"
            if (layer.bias is None) != (first.bias is None) or layer.row != first.row:
                return "a bias or a preferred row that the others do not have"
            if layer.bias is not None and layer.bias.dtype != first.bias.dtype:
                return "biases of different dtypes"
        return ""

    def __call__(self, layers: Sequence[QuantLinear], x: Tensor) -> Tensor:
        """Return the results of the layers behind one another, ``[..., n of all]``."""
        first = layers[0]
        if not self._is_of(layers):
            self._merge(layers)
        _, k, *rest = first.op_args
        return linear(x, self.weight, (self.n, k, *rest), self.bias, row=first.row_number)

    def _is_of(self, layers: Sequence[QuantLinear]) -> bool:
        if self.weight is None:
            return False
        at = self.weight.data_ptr()
        for layer, size in zip(layers, self.sizes, strict=True):
            parameters = layer._parameters
            if parameters["weight"].data_ptr() != at:
                return False
            at += size
        return self.bias is None or self._has_biases(layers)

    def _has_biases(self, layers: Sequence[QuantLinear]) -> bool:
        at = self.bias.data_ptr()
        for layer in layers:
            bias = layer._parameters["bias"]
            if bias is None or bias.data_ptr() != at:
                return False
            at += bias.nbytes
        return True

    @torch.no_grad()
    def _merge(self, layers: Sequence[QuantLinear]) -> None:
        self.n = sum(layer.out_features for layer in layers)
        self.sizes = [layer.weight.nbytes for layer in layers]
        self.weight = _joined([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])


def _joined(parts: Sequence[torch.nn.Parameter]) -> Tensor:
    """The parts behind one another in new memory, of which each becomes a view."""
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return whole
