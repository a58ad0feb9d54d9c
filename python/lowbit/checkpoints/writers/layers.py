# SPDX-License-Identifier: Apache-2.0
"""The weights of a transformers model under the names of its checkpoints, which differ from those of the model: experts
are separate there, and some names are those of an older version.

transformers turns a state dict of the model into one of a checkpoint. It is given row numbers in place of packed
weights, so that it says which rows of which weight a name of the checkpoint stands for.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from lowbit.checkpoints.writers.writer import CodedLayer
from lowbit.formats.spec import StoredWeight
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import (
    LayerWeight,
    is_packed,
    is_packed_value,
    is_trained,
    kind_of,
    layer_with,
    layout_name,
    named_weights,
)
from lowbit.quant.output_head import head_layers
from lowbit.quant.permuted_linear import PERMUTATION
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.select import adapters_in

_PREFIX_CHANGE = getattr(core_model_loading, "PrefixChange", ())  # not in the first versions of transformers 5


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a packed weight that are a weight of their own in a checkpoint.

    Args:
        name: the name of the layer in the checkpoint.
        path: the name of the layer in the model.
        module, weight: the layer and its weight.
        rows: the rows, int64, counted over all matrices of the weight.
    """

    name: str
    path: str
    module: nn.Module
    weight: LayerWeight
    rows: Tensor
    is_head: bool

    def coded(self) -> CodedLayer:
        """Return the codes, scales and zero points of these rows."""
        spec, weight = kind_of(self.module).spec_of(self.module, self.weight), self.weight
        matrix, packed = int(self.rows[0]) // weight.n, self.module._parameters[weight.key].detach().cpu()
        layout = kind_of(self.module).layout_of(self.module)
        coded = CodedWeight.unpack(
            packed if weight.experts is None else packed[matrix], StoredWeight(spec, weight.n, weight.k, layout)
        )
        rows = self.rows - matrix * weight.n
        if not torch.equal(rows, torch.arange(weight.n)):
            names = ("codes", "column_scale", "group_scale", "zero")
            parts = {name: part[rows] for name in names if (part := getattr(coded, name)) is not None}
            coded = replace(coded, **parts)
        permutation = self.module._buffers.get(PERMUTATION)
        order = None if permutation is None else permutation.cpu()
        return CodedLayer(self.name, self.path, coded, order, self.is_head)


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The weights of a model as a checkpoint stores them.

    Args:
        packed: the weights with codes.
        floats: all other tensors, by their names in the checkpoint.
        float_layers: the names of linear layers and routers without codes, in the checkpoint and in the model.
    """

    packed: list[PackedRows]
    floats: dict[str, Tensor]
    float_layers: list[str]


def checkpoint_weights(model: PreTrainedModel) -> CheckpointWeights:
    """Return the weights of a model as a checkpoint stores them.

    Raises:
        ValueError: no layer is packed, or a layer has weights that are no codes of a linear layer: an adapter, an
            embedding, blocks, or experts that a checkpoint stores as one tensor. The message names it.
    """
    _check(model)
    tensors = _Tensors(model)
    if not tensors.owners:
        raise ValueError("save: model must have layers that lowbit packed, got none")
    twin = copy.copy(model)  # its table of conversions is another: packed weights are named as float ones here
    twin._weight_conversions = [
        item for item in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(item, _PREFIX_CHANGE)
    ]
    floats = revert_weight_conversion(twin, tensors.floats)
    packed = [*_packed_rows(model, tensors, revert_weight_conversion(twin, tensors.numbers))]
    return CheckpointWeights(packed, floats, [*_float_layers(model, tensors, floats)])


class _Tensors:
    """The state dict of a model: float tensors, and row numbers in place of packed weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.floats: dict[str, Tensor] = {}
        self.numbers: dict[str, Tensor] = {}
        self.owners: list[tuple[int, str, nn.Module, LayerWeight]] = []
        """The first row number of each packed weight, and whose it is."""
        self.names: dict[int, str] = {}
        """The names of the floats, by their ids."""
        weights = {key: (path, module, weight) for key, path, module, weight in named_weights(model)}
        packed = {
            key: (path, module, weight)
            for key, (path, module, weight) in weights.items()
            if is_packed(module) and is_packed_value(module._parameters[weight.key])
        }
        beside = {layout_name(key) for key in packed}
        beside |= {f"{path}.{PERMUTATION}" for path, *_ in packed.values()}
        seen: set[int] = set()
        ignored, end = set(model._keys_to_ignore_on_save or ()), 0
        for key, value in model.state_dict(keep_vars=True).items():
            if key in beside or key in ignored or id(value) in seen:
                continue
            seen.add(id(value))
            if key not in packed:
                self.floats[key] = value.detach()
                self.names[id(self.floats[key])] = key
                continue
            path, module, weight = packed[key]
            spec = kind_of(module).spec_of(module, weight)
            if spec.is_float:
                self.floats[key] = kind_of(module).dequantize(module, weight, getattr(torch, spec.format))
                self.names[id(self.floats[key])] = key
                continue
            if kind_of(module) is EMBEDDING:
                raise ValueError(
                    f"save: embeddings must be float, got {path} as {spec.name}; "
                    "lowbit.dequantize_(model.get_input_embeddings()) makes it float"
                )
            numbers = torch.arange(end, end + weight.n * (weight.experts or 1)).view(*weight.shape[:-1], 1)
            self.numbers[key] = weight.value(numbers)
            self.owners.append((end, path, module, weight))
            end += numbers.numel()


def _check(model: PreTrainedModel) -> None:
    adapters = adapters_in(model)
    for name, module in model.named_modules():
        if id(module) in adapters:
            raise ValueError(f"save: the model must have no adapters, got {name}; merge_and_unload of peft merges them")
        if isinstance(module, BlockSparseLinear) or is_trained(module):
            raise ValueError(f"save: layers must be packed or float, got {name}, a {type(module).__name__}")


def _packed_rows(model: PreTrainedModel, tensors: _Tensors, made: dict[str, Tensor]) -> Iterator[PackedRows]:
    heads = {id(module) for module in head_layers(model)}
    begins = [begin for begin, *_ in tensors.owners]
    for key, numbers in made.items():
        rows, name = numbers.flatten(), layer_with(key)
        begin, path, module, weight = tensors.owners[bisect_right(begins, int(rows[0])) - 1]
        rows = rows - begin
        whole = numbers.dim() == 2 and numbers.shape[1] == 1 and len({*(rows // weight.n).tolist()}) == 1
        if not whole or name is None:
            raise ValueError(
                f"save: a checkpoint must have rows of their own for each matrix of {path}, a {type(module).__name__}, "
                f"got {key}, where transformers stores them otherwise"
            )
        yield PackedRows(name, path, module, weight, rows, id(module) in heads)


def _float_layers(model: PreTrainedModel, tensors: _Tensors, floats: dict[str, Tensor]) -> Iterator[str]:
    """Yield the names of layers with a float matrix, under both names where these differ."""
    tables = {module for module in model.modules() if kind_of(module) is EMBEDDING}
    for key, value in floats.items():
        name, mine = layer_with(key), layer_with(tensors.names.get(id(value), key))
        if value.dim() != 2 or name is None or (mine is not None and _module(model, mine) in tables):
            continue
        yield from dict.fromkeys((name, mine or name))
    tied = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    heads = {id(module) for module in head_layers(model)[:1]}
    for name, module in model.named_modules():
        if id(module) in heads and any(id(parameter) in tied for parameter in module.parameters(recurse=False)):
            yield name  # its weight is that of the table, in the file too


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
