# SPDX-License-Identifier: Apache-2.0
"""dequantize_: turn the QuantLinear layers of a model back into the float layers that they were, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adopt_lora_layers
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.fused import unfuse
from lowbit.quant.linear_layers import is_conv1d_class
from lowbit.quant.quant_embedding import QuantEmbedding, to_embedding_in_place
from lowbit.quant.quant_linear import QuantLinear, to_linear_in_place
from lowbit.tables.folding import LayerNames


@torch.no_grad()
def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> LayerNames:
    """Turn every `QuantLinear`, `QuantEmbedding` and `BlockSparseLinear` of ``model`` into the layer that it was,
    with the decoded weight, in place: an nn.Linear, an nn.Embedding, a Conv1D of transformers. One that was made
    packed is an nn.Linear.

    The weights are the values of the packed ones: the error of rounding stays. Layers keep their identity, hooks and
    bias; layers that share a packed weight share the float one. Fused modules become what they were. Other threads may
    call the model meanwhile: each layer computes with the packed weight or the float one. The config of a model of
    transformers no longer says that it is packed.

    Args:
        model: any module, also a QuantLinear by itself.
        dtype: of the weights, and of the biases of their layers. None: that of the bias, without one that of the first
            float parameter of the model, or float32; of an embedding that of its results, of blocks their own.

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
    ] = {}  # with the packed weight, whose id stays its own as long as it lives
    for name, module in model.named_modules():
        if not isinstance(module, (QuantLinear, QuantEmbedding, BlockSparseLinear)):
            continue
        packed, bias = module.weight, getattr(module, "bias", None)
        wanted = dtype or (others if bias is None else bias.dtype)
        if isinstance(module, QuantEmbedding):
            wanted = dtype or module.like.dtype
        elif isinstance(module, BlockSparseLinear):
            wanted = dtype or packed.dtype
        key = id(packed), is_conv1d_class(module.float_class)
        if key not in decoded:
            matrix = module.dequantize(wanted)
            decoded[key] = packed, nn.Parameter(matrix.T.contiguous() if key[1] else matrix)
        weight = decoded[key][1]
        if bias is not None and bias.dtype != weight.dtype:
            bias.data = bias.data.to(weight.dtype)
        if isinstance(module, QuantEmbedding):
            to_embedding_in_place(module, weight)
        elif isinstance(module, BlockSparseLinear):
            module.become_linear(weight)
        else:
            to_linear_in_place(module, weight)
        yield name
