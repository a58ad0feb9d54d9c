# SPDX-License-Identifier: Apache-2.0
"""A copy of a model whose packed layers use the ops of another runtime. The model itself does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.fused import Fused, unfuse
from lowbit.quant.kinds import is_packed, is_trained, kind_of, weights_of
from lowbit.quant.permuted_linear import PermutedLinear
from lowbit.quant.quant_embedding import EMBEDDING, QuantEmbedding
from lowbit.quant.quant_linear import LINEAR


def rewritten(model: nn.Module, write: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    """Return a copy of ``model`` with ``write(layer, name)`` in place of each packed layer, and with all modules
    unfused.

    All other parameters and buffers are shared with the model. Linear layers are written before the embeddings that may
    share their weights.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a weight is on the meta device, or a layer is being trained by `lowbit.training` or is a
            `QuantExperts`. The message names the layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"export: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if is_trained(module):
            end = f"end it with lowbit.training.{module.end}"
            raise ValueError(f"export: {name} must not be in training, got {module.trained_as}; {end}")
    packed = [(name, module) for name, module in model.named_modules() if is_packed(module)]
    for name, layer in packed:
        if kind_of(layer) not in (LINEAR, EMBEDDING):
            raise ValueError(
                f"export: {name} must be a linear layer or an embedding, got a {kind_of(layer).name}; "
                "leave it float with filter_fn of quantize_"
            )
        if isinstance(layer, PermutedLinear):
            raise ValueError(
                f"export: {name} must read its inputs in their order, got a permutation of them (act order of GPTQ); "
                "call lowbit.dequantize_ and quantize_ on it"
            )
        if layer.weight.is_meta:
            raise ValueError(f"export: {name} must have its weight in memory, got the meta device")
    packed.sort(key=lambda each: not kind_of(each[1]).multiplies)
    shared = [*model.parameters(), *model.buffers()]
    shared += [module.facts for module in model.modules() if isinstance(module, Fused)]
    copies: dict[int, Any] = {id(value): value for value in shared}
    copies |= {id(module): write(module, name) for name, module in packed}
    result = copy.deepcopy(model, copies)
    unfuse(result)
    return result


class RewrittenEmbedding(nn.Embedding):
    """A `QuantEmbedding` in other ops. Only the rows that are looked up are decoded."""

    dtype: torch.dtype
    factor: float | None

    def rows(self, indices: Tensor) -> Tensor:
        """Return these rows of the weight, float32 ``[..., k]``."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        rows = self.rows(input).to(self.dtype)
        return rows if self.factor is None else rows * self.factor


def with_class(layer: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return a module of this class with the attributes, hooks and bias of ``layer``, without its weight."""
    module = copy.copy(layer)
    module.__class__ = cls
    packed = {weight.key for weight in weights_of(layer)}
    module._parameters = {name: value for name, value in layer._parameters.items() if name not in packed}
    module._buffers, module._modules = {}, {}
    if isinstance(layer, QuantEmbedding):
        module.dtype, module.factor = layer.like.dtype, layer.factor
    return module
