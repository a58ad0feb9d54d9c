# SPDX-License-Identifier: Apache-2.0
"""Layers of a transformers model for the packed weights of a checkpoint. They are created before transformers reads the
checkpoint, and converted to the kernels' layout afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.quant.block_sparse import Blocks, hold_blocks
from lowbit.quant.kinds import is_packed, kind_of, layer_with, layout_name, packed_weights, weight_in
from lowbit.quant.layout import in_layout
from lowbit.quant.load import hold_unset, sparse_layers, stored_weights
from lowbit.quant.permuted_linear import PERMUTATION


def hold_stored(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    """Replace every layer whose packed weight or blocks are in the files by a QuantLinear, QuantEmbedding or
    BlockSparseLinear on the meta device, in the layout of the file.

    Returns whether there is one. Of tied weights, the files need to have only one.
    """
    for name, shared in tied_modules(model).items():
        weight = weight_in(name)
        held = [stored[weight_in(other)] for other in shared if weight_in(other) in stored]
        alike = [value for value in held if value.is_floating_point() != (layout_name(weight) in stored)]
        if held:
            stored.setdefault(weight, next(iter(alike or held)))
    packed, sparse = [*stored_weights(model, stored)], dict(sparse_layers(model, stored))
    for name, module, weight, held in packed:
        hold_unset(module, weight, held, stored.get(f"{name}.{PERMUTATION}"))
        numbers = layout_name(weight.key)
        module._buffers[numbers] = torch.empty_like(stored[f"{name}.{numbers}"], device="meta")
        # Otherwise transformers initializes the packed weight of an embedding at random if only its tied head is in the
        # file.
        module._is_hf_initialized = not kind_of(module).multiplies
    for module, blocks in sparse.values():
        meta = Blocks(*(part.to("meta") for part in (blocks.values, blocks.crow_indices, blocks.col_indices)))
        hold_blocks(module, nn.Parameter(meta.values.to(module.weight.dtype)), meta)
    untie(model, {*(name for name, *_ in packed), *sparse})
    return bool(packed or sparse)


def untie(model: nn.Module, packed: set[str]) -> None:
    """Remove the ties between packed and float weights, which were untied when the first were packed. Weights that were
    tied to the same weight stay tied to each other."""
    ties, first = model.all_tied_weights_keys, {}
    for target, source in [*ties.items()]:
        if (layer_with(target) in packed) != (layer_with(source) in packed):
            del ties[target]
            if source in first:
                ties[target] = first[source]
            first.setdefault(source, target)


def leave_bias(*_: nn.Module) -> None:
    """Do nothing, in place of the model's own method for ties. That method would cut the bias of a head to the number
    of rows of its weight, and packed weights have a different number."""


def repack(model: nn.Module) -> None:
    """Repack all weights that the checkpoint has in another layout or version, one at a time. Tied weights stay tied,
    in the layout of the linear layer."""
    repacked: dict[int, tuple[Tensor, nn.Parameter]] = {}  # holds the old weight too, so that its id stays unique
    packed = [module for module in model.modules() if is_packed(module)]
    packed.sort(key=lambda module: kind_of(module).layout != _C.LAYOUT)  # embeddings after linear layers
    for module in packed:
        kind = kind_of(module)
        for weight in packed_weights(module):
            value, numbers = module._parameters[weight.key], layout_name(weight.key)
            if id(value) in repacked:
                stored, dtype = weight.stored(kind.spec_of(module, weight)), kind.dtype_of(module, None)
                kind.hold(module, weight.key, repacked[id(value)][1], stored, dtype)
            elif kind.layout == _C.LAYOUT:
                held = {weight.key: value, numbers: module._buffers[numbers]}
                if (wanted := in_layout(held, weight.key)) is not held:
                    new = nn.Parameter(wanted[weight.key], requires_grad=False)
                    repacked[id(value)] = value, new
                    module._parameters[weight.key], module._buffers[numbers] = new, wanted[numbers]
