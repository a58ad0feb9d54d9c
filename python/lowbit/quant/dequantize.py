# SPDX-License-Identifier: Apache-2.0
"""dequantize_: turn the packed layers of a model back into float layers, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adopt_adapters
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.fused import unfuse
from lowbit.quant.kinds import is_packed, kind_of
from lowbit.tables.folding import LayerNames


@torch.no_grad()
def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> LayerNames:
    """Turn the packed layers of ``model`` back into float layers, in place.

    Every `QuantLinear`, `QuantEmbedding`, `QuantExperts` and `BlockSparseLinear` gets its former class back, with the
    decoded weight: nn.Linear, nn.Embedding, or a Conv1D or module of experts of transformers. A QuantLinear that never
    was a float layer becomes an nn.Linear.

    The weights are the decoded values, so the rounding error remains. Layers keep their identity, hooks and bias;
    layers that share a packed weight share the float weight. Fused modules are unfused. Other threads may call the
    model at the same time: each layer computes with either the packed or the float weight. The config of a model of
    transformers no longer describes it as quantized.

    Args:
        model: any module, including a single QuantLinear.
        dtype: the dtype of the weights and of their layers' biases. None chooses for each layer: the dtype of the bias;
            without a bias, that of the model's first float parameter, or float32; for an embedding, that of its
            results; for a BlockSparseLinear, that of its blocks.

    Returns:
        A list of the layers' names in the order of ``named_modules``. Printed, it has one line for layers of the same
        kind.

    Raises:
        ValueError: dtype is not a float dtype.

    Example:
        >>> lowbit.dequantize_(model)
        model.layers.*.self_attn.q_proj x 16
        model.layers.*.self_attn.k_proj x 16
        ...
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dequantize_: dtype must be a float dtype or None, got dtype={dtype}")
    with changing_layers(model):
        names = LayerNames(_become_float(model, dtype))
    adopt_adapters(model)
    return names


def _become_float(model: nn.Module, dtype: torch.dtype | None) -> Iterator[str]:
    unfuse(model)
    others = next((parameter.dtype for parameter in model.parameters() if parameter.dtype in FLOATS), torch.float32)
    decoded: dict[
        tuple[int, bool], tuple[nn.Parameter, nn.Parameter]
    ] = {}  # keeps the packed weights alive: an id is only unique as long as its object lives
    for name, module in model.named_modules():
        is_sparse = isinstance(module, BlockSparseLinear)
        if not is_sparse and not is_packed(module):
            continue
        kind, floats = kind_of(module), {}
        wanted = dtype or (module.weight.dtype if is_sparse else kind.dtype_of(module, others))
        for weight in kind.weights(module):
            packed, bias = module._parameters[weight.key], module._parameters.get(weight.bias)
            key = id(packed), weight.transposed
            if key not in decoded:
                decoded[key] = packed, nn.Parameter(kind.dequantize(module, weight, wanted).contiguous())
            floats[weight.key] = value = decoded[key][1]
            if bias is not None and bias.dtype != value.dtype:
                bias.data = bias.data.to(value.dtype)
        if is_sparse:
            module.become_linear(*floats.values())
        else:
            kind.give_back(module, floats)
        yield name
