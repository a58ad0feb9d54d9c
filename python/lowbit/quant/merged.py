# SPDX-License-Identifier: Apache-2.0
"""Several QuantLinear layers with the same input, multiplied as one: x is read and rounded once, in one parallel
region.

The packed weights are concatenated in one tensor, and each layer's weight becomes a view of it. So names, state dict
and memory use stay the same, and each layer can still be called by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.ops.linear import linear
from lowbit.quant.quant_linear import QuantLinear

PANEL = 16
"""Outputs per panel. Layers can only be merged if their out_features are multiples of it, so that each ends with a
panel."""


class MergedLinear:
    """Linear layers computed as one product, if their formats allow it. When their weights have moved (by ``.to()``, or
    by a state dict that was assigned), they are merged again."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        """The biases of all layers, with zeros for those that have none (the keys of Whisper)."""
        self._have_bias: tuple[bool, ...] = ()

    def __call__(self, layers: Sequence[QuantLinear], x: Tensor) -> Tensor:
        """Return the concatenated results of the layers, ``[..., sum of n]``."""
        if not self.holds(layers):
            return torch.cat([layer(x) for layer in layers], dim=-1)
        return linear(x, self.weight, self.op_args, self.bias, row=layers[0].row_number)

    def holds(self, layers: Sequence[QuantLinear]) -> bool:
        """Return whether ``weight``, ``bias`` and ``op_args`` describe these layers, after merging them if possible."""
        if self._is_of(layers):
            return True
        if len(layers) == 1:
            self.op_args, self.weight, self.bias = layers[0].op_args, layers[0].weight, layers[0].bias
        elif _can_be_one(layers):
            self._merge(layers)
        else:
            return False
        self._have_bias = tuple(layer.bias is not None for layer in layers)
        return True

    def _is_of(self, layers: Sequence[QuantLinear]) -> bool:
        """Return whether each weight and bias is still its view of the merged tensor. Comparing addresses is enough,
        because memory that is referenced here cannot be reused."""
        if self.weight is None:
            return False
        at, whole_bias = self.weight.data_ptr(), self.bias
        bias_at = 0 if whole_bias is None else whole_bias.data_ptr()
        for layer, has_bias in zip(layers, self._have_bias, strict=True):
            parameters = layer._parameters
            weight, bias = parameters["weight"], parameters["bias"]
            if weight.data_ptr() != at or (bias is not None) is not has_bias:
                return False
            if has_bias and bias.data_ptr() != bias_at:
                return False
            at += weight.nbytes
            bias_at += 0 if whole_bias is None else layer.out_features * whole_bias.element_size()
        return True

    @torch.inference_mode(False)  # the parameters become views, and a later call may need a gradient
    @torch.no_grad()
    def _merge(self, layers: Sequence[QuantLinear]) -> None:
        self.op_args = (sum(layer.out_features for layer in layers), *layers[0].op_args[1:])
        parameters = [layer._parameters for layer in layers]  # a layer that another thread dequantizes gets a new dict
        weights = [inside["weight"] for inside in parameters]
        if any(weight.dtype != torch.uint8 for weight in weights):
            raise RuntimeError("a layer became float while its weight was joined to others")
        whole = torch.cat([weight.data for weight in weights])
        for inside, view in zip(parameters, whole.split([len(weight) for weight in weights]), strict=True):
            # A new Parameter instead of new .data: it keeps the old memory alive for a kernel in another thread.
            inside["weight"] = torch.nn.Parameter(view, requires_grad=False)
        self.weight = whole
        self.bias = _joined_biases(layers)


def _can_be_one(layers: Sequence[QuantLinear]) -> bool:
    first = layers[0]
    return len({layer.bias.dtype for layer in layers if layer.bias is not None}) <= 1 and all(
        layer.op_args[1:] == first.op_args[1:]  # same in_features and format
        and layer.out_features % PANEL == 0
        and layer.row == first.row
        for layer in layers
    )


def _joined_biases(layers: Sequence[QuantLinear]) -> Tensor | None:
    """Concatenate the biases in new memory, and make each a view of it."""
    given = next((layer.bias for layer in layers if layer.bias is not None), None)
    if given is None:
        return None
    biases = [given.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers]
    whole = torch.cat(biases)
    for layer, view in zip(layers, whole.split([layer.out_features for layer in layers]), strict=True):
        if layer.bias is not None:
            layer.bias.data = view
    return whole


def split_parts(layer: QuantLinear, count: int) -> list[tuple[Tensor, Tensor | None, tuple]] | None:
    """Return weight, bias and op_args of each of ``count`` equal parts of the outputs, as views; None if a panel has
    outputs of two of them."""
    n, weight, bias = layer.out_features // count, layer.weight, layer.bias
    if layer.out_features != count * n or n % PANEL or weight.shape[0] % count:
        return None
    biases = count * (None,) if bias is None else bias.data.split(n)
    op_args = (n, *layer.op_args[1:])
    return [(part, own, op_args) for part, own in zip(weight.data.chunk(count, dim=0), biases, strict=True)]
