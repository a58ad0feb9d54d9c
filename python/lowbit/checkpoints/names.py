# SPDX-License-Identifier: Apache-2.0
"""The parameter of a transformers model for each tensor of a checkpoint, and the files' facts about their weights.

A checkpoint may name a parameter as an older version did, or without the prefix of its base model; transformers renames
while it loads, and this does the same.
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

_DTYPES = {"U8": torch.uint8, "I8": torch.int8}  # dtypes of codes; the others need no name


class LayoutRenaming(WeightRenaming):
    """Puts a layout beside its weight, where the model ends a name of its checkpoint with "weight" as it loads it:
    Inkling 2 makes ``k_sconv.weight_proj.layout`` to ``k_sconv.weight_proj.weight.layout``."""

    def __init__(self) -> None:
        super().__init__(source_patterns=r"\.weight\.layout$", target_patterns=".layout")


def model_names(model: nn.Module, keys: Iterable[str], packed: Container[str] = frozenset()) -> dict[str, str | None]:
    """Return the model's name of each tensor of a checkpoint; None where the model makes a parameter out of it by more
    than a new name (experts that are merged, projections that are split). ``packed``: those that are packed, of which
    nothing else is made."""
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
    """Return a state dict with the names that the model of transformers has, where it has some by older ones."""
    if not isinstance(model, PreTrainedModel):
        return state
    known = model.state_dict(keep_vars=True).keys()
    old = {_weight_of(key) for key in state if key not in known}
    names = {key: name for key, name in model_names(model, old).items() if name in known and name not in state}
    return {_renamed(key, names): tensor for key, tensor in state.items()}


def _weight_of(key: str) -> str:
    """The weight that a layout or an index is beside; of anything else its own name."""
    layer, _, last = key.rpartition(".")
    return weight_in(layer) if last in INDICES else weight_name(key) or key


def _renamed(key: str, names: Mapping[str, str | None]) -> str:
    """The name of the model for a key, of that for the weight beside it."""
    of = _weight_of(key)
    name = names.get(of)
    if name is None:
        return key
    if key == of:
        return name
    layer, _, last = name.rpartition(".")[0], "", key.rpartition(".")[2]
    return f"{layer}.{last}" if last in INDICES else layout_name(name)


def stored_tensors(model: nn.Module, files: list[str]) -> dict[str, Tensor]:
    """Return the weights that the files hold, on the meta device, and the numbers beside packed and block-sparse ones,
    by the names of the model.

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
    # A weight that is tied to another is not in the file, and its layout is.
    stored = {weight: layer if (layer := layer_with(weight)) in bare else weight for weight in map(_weight_of, found)}
    packed = {key for weight, key in stored.items() if layout_name(weight) in found}
    of_model = model_names(model, stored.values(), packed)
    names = {weight: of_model[key] for weight, key in stored.items()}
    return {_renamed(key, names): tensor for key, tensor in found.items() if names[_weight_of(key)] is not None}


def _without_suffix(files: list[str]) -> set[str]:
    """Packed weights whose names do not end in "weight", because the model saves them so; the layout beside tells."""
    keys: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys.update(opened.keys())
    return {layer_with(weight) for key in keys if (weight := weight_name(key))} & keys
