# SPDX-License-Identifier: Apache-2.0
"""The parameter names of a transformers model for the tensors of a checkpoint, and the shapes and layouts stored there.

A checkpoint may name parameters as an older version did, or without the prefix of the base model. transformers renames
them while it loads, and this module does the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel

from lowbit.quant.block_sparse import INDICES
from lowbit.quant.kinds import layer_with, layout_name, weight_in, weight_name
from lowbit.quant.permuted_linear import PERMUTATION

_BESIDE = (*INDICES, PERMUTATION)
"""Names of tensors that belong to the weight of their layer, beside its layout."""
_DTYPES = {"U8": torch.uint8, "I8": torch.int8}  # dtypes of codes; the others need no name


class LayoutRenaming(WeightRenaming):
    """A renaming that puts a layout back next to its weight, for models whose own renaming appends "weight" to a name.

    For example, Inkling 2 turns ``k_sconv.weight_proj.layout`` into ``k_sconv.weight_proj.weight.layout``.
    """

    def __init__(self) -> None:
        super().__init__(source_patterns=r"\.weight\.layout$", target_patterns=".layout")


def model_names(model: nn.Module, keys: Iterable[str], packed: Container[str] = frozenset()) -> dict[str, str | None]:
    """Return the model's name for each tensor of a checkpoint. It is None if the model converts the tensor in any other
    way (merged experts, split projections).

    ``packed`` has the keys of packed weights, which are never converted.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    known, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    names: dict[str, str | None] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, [] if key in packed else converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        names[key] = name if pattern is None else None
    return names


def renamed(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the names that the transformers model uses, where the keys have older ones."""
    if not isinstance(model, PreTrainedModel):
        return state
    known = model.state_dict(keep_vars=True).keys()
    old = {_weight_of(key) for key in state if key not in known}
    names = {key: name for key, name in model_names(model, old).items() if name in known and name not in state}
    return {renamed_key(key, names): tensor for key, tensor in state.items()}


def _weight_of(key: str) -> str:
    """Return the name of the weight that a layout, an index or a permutation belongs to, or the key itself if it is
    none of these."""
    layer, _, last = key.rpartition(".")
    return weight_in(layer) if last in _BESIDE else weight_name(key) or key


def renamed_key(key: str, names: Mapping[str, str | None]) -> str:
    """Return the other name of a key, derived from that of its weight, which is in ``names`` or keeps its name."""
    of = _weight_of(key)
    name = names.get(of)
    if name is None:
        return key
    if key == of:
        return name
    layer, _, last = name.rpartition(".")[0], "", key.rpartition(".")[2]
    return f"{layer}.{last}" if last in _BESIDE else layout_name(name)


def stored_tensors(model: nn.Module, files: list[str]) -> dict[str, Tensor]:
    """Return the weights in the files, on the meta device, and the layouts and indices of packed and block-sparse ones,
    by the model's names.

    Raises:
        ValueError: a file is not safetensors, or there is none.
    """
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise ValueError(
            "from_pretrained: a checkpoint of lowbit must be safetensors files, got "
            f"{', '.join(files) or 'a state dict'}; lowbit.load(model, file) takes other files"
        )
    bare = _without_suffix(files)
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys = opened.keys()
            for key in keys:
                if _weight_of(key) == key:
                    part = opened.get_slice(key)
                    dtype = _DTYPES.get(part.get_dtype(), torch.float32)
                    name = weight_in(key) if key in bare else key
                    found[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                elif "." in key:
                    found[key] = opened.get_tensor(key).clone()
    # A tied weight is not in the file, but its layout is.
    stored = {weight: layer if (layer := layer_with(weight)) in bare else weight for weight in map(_weight_of, found)}
    packed = {key for weight, key in stored.items() if layout_name(weight) in found}
    of_model = model_names(model, stored.values(), packed)
    names = {weight: of_model[key] for weight, key in stored.items()}
    return {renamed_key(key, names): tensor for key, tensor in found.items() if names[_weight_of(key)] is not None}


def _without_suffix(files: list[str]) -> set[str]:
    """Return the packed weights whose names do not end in "weight", because the model saves them so. They are
    recognized by their layouts."""
    keys: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys.update(opened.keys())
    return {layer_with(weight) for key in keys if (weight := weight_name(key))} & keys
