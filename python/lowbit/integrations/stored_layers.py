# SPDX-License-Identifier: Apache-2.0
"""The layers of a model of transformers for the packed weights of a checkpoint: made before transformers reads it, and
put in the kernels' layout behind it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.spec import LinearSpec
from lowbit.integrations.selection import tied_modules
from lowbit.quant.block_sparse import Blocks, hold_blocks
from lowbit.quant.layout import in_layout
from lowbit.quant.linear_layers import is_embedding
from lowbit.quant.load import packed_layers, sparse_layers
from lowbit.quant.quant_embedding import QuantEmbedding, quantize_embedding_in_place
from lowbit.quant.quant_linear import QuantLinear, quantize_in_place


def become_packed(
    module: nn.Module, weight: nn.Parameter, spec: LinearSpec, layout: str, dtype: torch.dtype | None = None
) -> None:
    """Turn a float layer into the QuantLinear or QuantEmbedding that holds the packed ``weight``; ``dtype`` is that of
    the results of a table."""
    if is_embedding(module):
        quantize_embedding_in_place(module, weight, spec, layout, dtype)
    else:
        quantize_in_place(module, weight, spec)


def hold_stored(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    """Make every layer whose packed weight or blocks the files hold a QuantLinear, QuantEmbedding or
    BlockSparseLinear on the meta device, in the layout of the file; return whether there is one. Of tied weights the
    files may hold one."""
    for name, shared in tied_modules(model).items():
        held = [stored[f"{other}.weight"] for other in shared if f"{other}.weight" in stored]
        alike = [weight for weight in held if weight.is_floating_point() != (f"{name}.layout" in stored)]
        if held:
            stored.setdefault(f"{name}.weight", next(iter(alike or held)))
    packed, sparse = dict(packed_layers(model, stored)), dict(sparse_layers(model, stored))
    for name, (module, layer) in packed.items():
        weight = torch.empty(layer.shape, dtype=torch.uint8, device="meta")
        become_packed(module, nn.Parameter(weight, requires_grad=False), layer.spec, layer.layout)
        module.layout = torch.empty_like(stored[f"{name}.layout"], device="meta")
        # transformers would draw random numbers for the packed weight of a table whose tied head alone is in the file.
        module._is_hf_initialized = is_embedding(module)
    for module, blocks in sparse.values():
        meta = Blocks(*(part.to("meta") for part in (blocks.values, blocks.crow_indices, blocks.col_indices)))
        hold_blocks(module, nn.Parameter(meta.values.to(module.weight.dtype)), meta)
    _untie(model, {*packed, *sparse})
    return bool(packed or sparse)


def _untie(model: nn.Module, packed: set[str]) -> None:
    """Forget the ties between packed weights and float ones, which were untied when the first were packed; those that
    were tied to the same weight stay tied to each other."""
    ties, first = model.all_tied_weights_keys, {}
    for target, source in [*ties.items()]:
        if (target.removesuffix(".weight") in packed) != (source.removesuffix(".weight") in packed):
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
    repacked: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the old one, so that its id stays its own
    for module in model.modules():
        if not isinstance(module, QuantLinear):
            continue
        held = {"weight": module.weight, "layout": module.layout}
        if (wanted := in_layout(held, "")) is not held:
            new = held["weight"], nn.Parameter(wanted["weight"], requires_grad=False)
            module.weight, module.layout = repacked.setdefault(id(held["weight"]), new)[1], wanted["layout"]
    for module in model.modules():
        if isinstance(module, QuantEmbedding) and id(module.weight) in repacked:
            module._hold(repacked[id(module.weight)][1], module.spec, _C.LAYOUT, module.like.dtype)
