# SPDX-License-Identifier: Apache-2.0
"""The layers of a model of transformers for the packed weights of a checkpoint: made before transformers reads it, and
put in the kernels' layout afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.quant.block_sparse import Blocks, hold_blocks
from lowbit.quant.kinds import is_packed, kind_of, layer_with, layout_name, packed_weights, weight_in
from lowbit.quant.layout import in_layout
from lowbit.quant.load import hold_unset, sparse_layers, stored_weights


def hold_stored(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    """Make every layer whose packed weight or blocks the files hold a QuantLinear, QuantEmbedding or
    BlockSparseLinear on the meta device, in the layout of the file; return whether there is one. Of tied weights the
    files may hold one."""
    for name, shared in tied_modules(model).items():
        weight = weight_in(name)
        held = [stored[weight_in(other)] for other in shared if weight_in(other) in stored]
        alike = [value for value in held if value.is_floating_point() != (layout_name(weight) in stored)]
        if held:
            stored.setdefault(weight, next(iter(alike or held)))
    packed, sparse = [*stored_weights(model, stored)], dict(sparse_layers(model, stored))
    for name, module, weight, held in packed:
        hold_unset(module, weight, held)
        numbers = layout_name(weight.key)
        module._buffers[numbers] = torch.empty_like(stored[f"{name}.{numbers}"], device="meta")
        # transformers would draw random numbers for the packed weight of a table whose tied head alone is in the file.
        module._is_hf_initialized = not kind_of(module).multiplies
    for module, blocks in sparse.values():
        meta = Blocks(*(part.to("meta") for part in (blocks.values, blocks.crow_indices, blocks.col_indices)))
        hold_blocks(module, nn.Parameter(meta.values.to(module.weight.dtype)), meta)
    _untie(model, {*(name for name, *_ in packed), *sparse})
    return bool(packed or sparse)


def _untie(model: nn.Module, packed: set[str]) -> None:
    """Forget the ties between packed weights and float ones, which were untied when the first were packed; those that
    were tied to the same weight stay tied to each other."""
    ties, first = model.all_tied_weights_keys, {}
    for target, source in [*ties.items()]:
        if (layer_with(target) in packed) != (layer_with(source) in packed):
            del ties[target]
            if source in first:
                ties[target] = first[source]
            first.setdefault(source, target)


def leave_bias(*_: nn.Module) -> None:
    """In place of the model's own step of tying, which cuts the bias of a head to as many elements as its weight has
    rows: a packed weight has other rows."""


def repack(model: nn.Module) -> None:
    """Repack each weight that the checkpoint held in another layout or version, one after the other; tied ones stay
    one, in the layout of the linear layer."""
    repacked: dict[int, tuple[Tensor, nn.Parameter]] = {}  # holds the old one too: its id is unique while it lives
    packed = [module for module in model.modules() if is_packed(module)]
    packed.sort(key=lambda module: kind_of(module).layout != _C.LAYOUT)  # a table follows the linear layer
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
