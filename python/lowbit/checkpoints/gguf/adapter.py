# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

A linear layer whose tensor is NAME has two: ``NAME.lora_a [r, k]`` and ``NAME.lora_b [n, r]``, of floats or of blocks.
What is added is ``alpha / r * lora_b @ lora_a``, or the product alone if alpha is 0 or missing. Rows of lora_b lie as
those of the weight do, in the order of llama.cpp.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lowbit.checkpoints.gguf.architectures import Architecture
from lowbit.checkpoints.gguf.file import GgufFile, GgufTensor
from lowbit.checkpoints.gguf.metadata import WITHOUT_EFFECT
from lowbit.checkpoints.gguf.mixtures import DENSE, MIXTURES
from lowbit.checkpoints.gguf.tensor_names import tensor_names
from lowbit.checkpoints.gguf.weights import column_order, processor_of, row_order, values_of
from lowbit.quant.kinds import kind_of, weight_named
from lowbit.tables.folding import first_five

_FACTORS = ("lora_a", "lora_b")
_KEYS = re.compile(
    "|".join((WITHOUT_EFFECT["describes the file"], WITHOUT_EFFECT["is read with the header"]))
    + r"|general\.(file_type|quantization_version)|adapter\.(type|lora\.(alpha|task_name))"
)
"""Keys that are read, or have no effect."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to a linear layer: ``scaling * up @ down``."""

    down: Tensor
    """``[r, k]``, float32."""
    up: Tensor
    """``[n, r]``, float32."""


@dataclass(frozen=True, slots=True)
class GgufAdapter:
    """A LoRA adapter by the names of the layers of transformers' model."""

    alpha: float
    """0: the scaling is 1."""
    layers: dict[str, Factors]


def read_adapter(file: GgufFile, model: nn.Module) -> GgufAdapter:
    """Return the adapter in a file.

    Args:
        file: the file.
        model: a language model of transformers, packed or float, with adapters or without; its configuration is read.

    Raises:
        ValueError: the file is no adapter, of another architecture or size than the model, or has a key or a tensor
            that is not read. The message names the file, and the key or the tensor.
    """
    path = file.paths[0]
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (got := file.value(key)) != wanted:
            raise ValueError(f"{path}: {key} of an adapter must be {wanted!r}, got {got!r:.80}")
    architecture = _architecture(file, model)
    keys = file.metadata.keys() | file.texts.keys()
    if unread := sorted(key for key in keys if not _KEYS.fullmatch(key)):
        raise ValueError(f"{path}: every key of an adapter must be known (docs/gguf.md), got {first_five(unread)}")
    alpha = file.value("adapter.lora.alpha", 0.0)
    if type(alpha) is not float or not np.isfinite(alpha):
        raise ValueError(f"{path}: adapter.lora.alpha must be a finite number, got {alpha!r:.80}")
    plain = _plain(model)
    processor = processor_of(file.architecture, architecture, plain.config)
    names = tensor_names(file, plain, architecture, processor)
    parameters = {tensors[0]: parameter for parameter, tensors in names.items() if len(tensors) == 1}
    layers: dict[str, Factors] = {}
    for tensor, (down, up) in _pairs(file):
        name, n, k = _layer(path, plain, parameters, tensor)
        rank = down.shape[0]
        if len(down.shape) != 2 or down.shape != (rank, k) or up.shape != (n, rank):
            raise ValueError(
                f"{path}: {tensor} of the model has shape [{n}, {k}], so lora_a and lora_b must be [r, {k}] and [{n}, r], "
                f"got {list(down.shape)} and {list(up.shape)}"
            )
        columns, rows = column_order(processor, tensor), row_order(processor, tensor, (n, k))
        of_x, of_y = _floats(down), _floats(up)
        layers[name] = Factors(of_x if columns is None else of_x[:, columns], of_y if rows is None else of_y[rows])
    file.check_unchanged()
    return GgufAdapter(alpha, layers)


def _architecture(file: GgufFile, model: nn.Module) -> Architecture:
    """Return the architecture of a file, which must be that of the model."""
    model_type = model.config.model_type
    tables = {name: [table[name] for table in (DENSE, MIXTURES) if name in table] for name in DENSE | MIXTURES}
    wanted = [name for name, found in tables.items() if any(each.model_type == model_type for each in found)]
    if file.architecture not in wanted:
        told = (
            f"that of the model, {' or '.join(wanted)}" if wanted else f"one whose model is a {model_type}, as this one"
        )
        raise ValueError(f"{file.paths[0]}: general.architecture must be {told}, got {file.architecture!r}")
    return next(each for each in tables[file.architecture] if each.model_type == model_type)


def _plain(model: nn.Module) -> nn.Module:
    """Return the model on the meta device, float and without adapters."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.tie_weights()
    return plain


def _pairs(file: GgufFile) -> Iterator[tuple[str, tuple[GgufTensor, GgufTensor]]]:
    """Yield the name of each tensor of the model that the file has factors of, and these."""
    pairs: dict[str, dict[str, GgufTensor]] = defaultdict(dict)
    for name, tensor in file.tensors.items():
        base, _, factor = name.rpartition(".")
        if factor not in _FACTORS:
            raise ValueError(f"{file.paths[0]}: every tensor must be a factor, NAME.lora_a or NAME.lora_b, got {name}")
        pairs[base][factor] = tensor
    if not pairs:
        raise ValueError(f"{file.paths[0]}: an adapter must have factors NAME.lora_a and NAME.lora_b, got no tensor")
    for base, pair in pairs.items():
        if len(pair) < len(_FACTORS):
            raise ValueError(f"{file.paths[0]}: {base} must have lora_a and lora_b, got {next(iter(pair))} alone")
        yield base, (pair["lora_a"], pair["lora_b"])


def _layer(path: object, plain: nn.Module, parameters: dict[str, str], tensor: str) -> tuple[str, int, int]:
    """Return the name of the linear layer of a tensor, and the shape of its weight."""
    parameter = parameters.get(tensor, "")
    found = weight_named(plain, parameter)
    if found is None or found[2].experts is not None:
        what = f"is {parameter}" if parameter else "is nothing of the model"
    elif not kind_of(found[1]).multiplies:
        what = f"is an {kind_of(found[1]).name}, {found[0]}"
    elif parameter in plain.all_tied_weights_keys:
        what = f"is the head {found[0]}, which shares its weight with the embedding"
    else:
        return found[0], found[2].n, found[2].k
    raise ValueError(f"{path}: LoRA is read for linear layers, got one for {tensor}, which {what}")


def _floats(tensor: GgufTensor) -> Tensor:
    """Return the numbers of a factor in float32, which holds those of every type exactly."""
    values = values_of(tensor)
    if not values.isfinite().all():
        raise ValueError(f"{tensor.name} must be finite, got inf or nan")
    return values
