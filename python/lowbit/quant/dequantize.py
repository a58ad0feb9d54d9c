# SPDX-License-Identifier: Apache-2.0
"""dequantize_: turn the QuantLinear layers of a model back into float layers, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adopt_lora_layers
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.fused import unfuse
from lowbit.quant.kinds import is_packed, kind_of
from lowbit.tables.folding import LayerNames


@torch.no_grad()
def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> LayerNames:
    """Turn every `QuantLinear`, `QuantEmbedding`, `QuantExperts` and `BlockSparseLinear` of ``model`` into the layer
    that it was, with the decoded weight, in place: an nn.Linear, an nn.Embedding, a Conv1D or a module of experts of
    transformers. One that was made packed is an nn.Linear.

    The weights are the values of the packed ones: the error of rounding stays. Layers keep their identity, hooks and
    bias; layers that share a packed weight share the float one. Fused modules become what they were. Other threads may
    call the model meanwhile: each layer computes with the packed weight or the float one. The config of a model of
    transformers no longer says that it is packed.

    Args:
        model: any module, also a QuantLinear by itself.
        dtype: the dtype of the weights, and of the biases of their layers. None: that of the bias, without one that of
            the first float parameter of the model, or float32; of an embedding that of its results, of blocks their
            own.

    Returns:
        Names of the layers, in the order of ``named_modules``, a list; empty where there is none. It prints one line
        for those of a kind.

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
    adopt_lora_layers(model)
    return names


def _become_float(model: nn.Module, dtype: torch.dtype | None) -> Iterator[str]:
    unfuse(model)
    others = next((parameter.dtype for parameter in model.parameters() if parameter.dtype in FLOATS), torch.float32)
    decoded: dict[
        tuple[int, bool], tuple[nn.Parameter, nn.Parameter]
    ] = {}  # holds the packed weight too: its id is unique while it lives
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
