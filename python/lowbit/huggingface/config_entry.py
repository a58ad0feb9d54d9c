# SPDX-License-Identifier: Apache-2.0
"""The entry ``quantization_config`` of a transformers model whose layers lowbit packed after the model was created.

`note_formats` is called for every model whose layers have changed (quant/changing_layers.py), and writes to its config
what ``from_pretrained`` with a `LowbitConfig` would have written. It looks at the layers, not at the call, so the entry
covers all calls so far. ``save_pretrained`` writes the entry to config.json, which tells ``from_pretrained`` that the
weights are packed.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from lowbit.checkpoints.tied_modules import tied_modules
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec
from lowbit.formats.text import config_of
from lowbit.huggingface.lowbit_config import METHOD, STORED, LowbitConfig
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.kinds import is_packed, is_packed_by_default, weights_of
from lowbit.quant.output_head import INT8, head_config, head_layers
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.quant.select import adapters_in, gates_of_experts, reason_of_size, reason_to_skip

_PREFIX_CHANGE = getattr(core_model_loading, "PrefixChange", ())  # not in the first versions of transformers 5
_owners: WeakValueDictionary[int, PreTrainedModel] = WeakValueDictionary()
"""The largest model seen with each config, by the id of the config. A model and its base model share one config."""


def note_formats(model: nn.Module) -> None:
    """Write the entry into the config of every transformers model in ``model``, or remove it if no layer is packed any
    more.

    ``model`` may be a part of a transformers model, whose config is then found through its modules. If the whole model
    was never seen, the entry has the most common format of the part's layers.
    """
    noted: set[int] = set()
    for module in model.modules():  # outer modules before inner ones
        if _is_whole(module) and id(module.config) not in noted:
            noted.add(id(module.config))
            _note(_owner(module))
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in noted:
            noted.add(id(config))
            _note_part(model, config)


def _is_whole(module: nn.Module) -> bool:
    """Whether this is a transformers model that ``from_pretrained`` can load, which requires a call of
    ``post_init``."""
    return isinstance(module, PreTrainedModel) and hasattr(module, "all_tied_weights_keys")


def _owner(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that owns this model's config: a model around it, if one was seen, or the model itself."""
    known = _known_owner(model.config)
    if known is not None and any(module is model for module in known.modules()):
        return known
    return model


def _known_owner(config: PreTrainedConfig) -> PreTrainedModel | None:
    owner = _owners.get(id(config))
    return owner if owner is not None and owner.config is config else None


def _own_config(model: PreTrainedModel) -> None:
    """Give the model its own copy of its config, unless the config is already known to be its own.

    Another model may have been created from the same object, and would be saved as packed. A base model keeps the
    config, because the model around it shares it.
    """
    known = _known_owner(model.config)
    inside = known is not None and any(module is known for module in model.modules())
    if not inside and (model.base_model is not model or known is not None):
        copies: dict[int, Any] = {}
        copy.deepcopy(model.config, copies)
        for module in model.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, PreTrainedConfig) and id(value) in copies:
                    module.__dict__[name] = copies[id(value)]
    _owners[id(model.config)] = model


def _note(model: PreTrainedModel) -> None:
    old = getattr(model.config, "quantization_config", None)
    if isinstance(old, dict) and old.get("quant_method") == METHOD:  # read from a config.json
        old = LowbitConfig.from_dict(old)
    if not isinstance(old, LowbitConfig | None):
        return  # another method; lowbit's layers are in addition to its own
    entry = entry_of(model, old)
    quantizer = getattr(model, "hf_quantizer", None)
    quantizer = quantizer if isinstance(getattr(quantizer, "quantization_config", None), LowbitConfig) else None
    if entry is not None:
        _own_config(model)
        model.config.quantization_config = entry
        if quantizer is not None:
            quantizer.quantization_config = entry
        _save_packed_by_their_names(model)
    elif quantizer is not None:
        quantizer.remove_quantization_config(model)
    elif old is not None:
        del model.config.quantization_config


def _note_part(part: nn.Module, config: PreTrainedConfig) -> None:
    owner = _known_owner(config)
    if owner is not None:
        _note(owner)
    elif getattr(config, "quantization_config", None) is None:
        formats = [_config_of(getattr(module, "spec", None)) for _, module in _packed(part)]
        if formats:
            config.quantization_config = LowbitConfig(_most(formats))


def entry_of(model: PreTrainedModel, old: LowbitConfig | None = None) -> LowbitConfig | None:
    """Return the `LowbitConfig` that would pack a float model as this one is packed, or None if no layer is packed.

    The layers have their codes, so the entry does not say how they were computed (GPTQ, HQQ). Formats without a
    configuration become "stored".

    Args:
        model: the model.
        old: the present entry of the model. Its ``fuse`` is kept, and so is "gguf", because the file has the formats.
    """
    layers = dict(_packed(model))
    if not layers:
        return None
    if old is not None and old.gguf:
        return old
    formats = {name: _config_of(getattr(module, "spec", None)) for name, module in layers.items()}
    heads = {id(module) for module in head_layers(model)}
    config = _most(
        [formats[name] for name, module in layers.items() if is_packed_by_default(module) and id(module) not in heads]
    )
    fuse = old is not None and old.fuse
    if config is None:
        return LowbitConfig(plan=formats, fuse=fuse)
    keep = list(model._keep_in_fp32_modules or ())
    plan: dict[str, FormatConfig | str | None] = {}
    head, gates = None, gates_of_experts(model)
    for name, module in layers.items():
        if id(module) in heads:
            head = formats[name] if is_packed_by_default(module) else head
        elif (
            not is_packed_by_default(module)
            or formats[name] != config
            or not should_convert_module(name, keep)
            or _is_small(module, config, model.dtype, gates)
        ):
            plan[name] = formats[name]
    plan |= dict.fromkeys(name for name in _left_float(model, config) if should_convert_module(name, keep))
    by_default = None if config == STORED else head_config("LowbitConfig", INT8, config)
    return LowbitConfig(config, plan=plan, head=INT8 if head in (None, by_default) else head, fuse=fuse)


def _save_packed_by_their_names(model: PreTrainedModel) -> None:
    """Make ``save_pretrained`` store packed weights separately, even where it would merge them (transformers splits
    some while it loads). The packed bytes of several layers cannot be joined into those of one."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # otherwise save_pretrained computes the same ones
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [item for item in conversions if not isinstance(item, _PREFIX_CHANGE)]
    names = [f"{name}.{weight.key}" for name, module in _packed(model) for weight in weights_of(module)]
    kept = [item for item in conversions if not (isinstance(item, WeightConverter) and _makes(item, names))]
    if len(kept) < len(conversions):
        model._weight_conversions = kept


def _makes(converter: WeightConverter, names: list[str]) -> bool:
    back = converter.reverse_transform()
    return any(back.rename_source_key(name)[1] is not None for name in names)


def _packed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the packed layers, by their names without adapters."""
    adapters = adapters_in(model)
    for name, module in model.named_modules():
        if _is_ours(module) and id(module) not in adapters:
            yield name.replace(".base_layer", "").replace(".original_module", ""), module


def _is_small(module: nn.Module, config: FormatConfig | str, dtype: torch.dtype, gates: set[int]) -> bool:
    """Return whether a layer is so small that `LowbitConfig` would leave it float."""
    if id(module) in gates or not isinstance(config, FormatConfig):
        return False
    return bool(reason_of_size(module, config, dtype))


def _left_float(model: PreTrainedModel, config: FormatConfig | str) -> Iterator[str]:
    """Yield the names of the linear layers that `LowbitConfig` would pack, but that are float here."""
    adapters, read, tied = adapters_in(model), weights_that_are_read(model), tied_modules(model)
    heads, gates = {id(module) for module in head_layers(model)}, gates_of_experts(model)
    for name, module in model.named_modules():
        ours = _is_ours(module) or id(module) in adapters | read.keys() or (name in tied and id(module) not in heads)
        if not is_packed_by_default(module) or ours or reason_to_skip(module):
            continue
        if not _is_small(module, config, model.dtype, gates):
            yield name.replace(".base_layer", "")


def _is_ours(module: nn.Module) -> bool:
    return is_packed(module) or isinstance(module, BlockSparseLinear)


@functools.cache
def _config_of(spec: LinearSpec | None) -> FormatConfig | str:
    """Return the configuration for this format, or "stored" if there is none. Block-sparse layers have no spec."""
    try:
        return STORED if spec is None else config_of(spec)
    except ValueError:
        return STORED


def _most(formats: list[FormatConfig | str]) -> FormatConfig | str | None:
    return Counter(formats).most_common(1)[0][0] if formats else None
