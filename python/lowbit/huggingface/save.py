# SPDX-License-Identifier: Apache-2.0
"""save: write a packed model as a checkpoint of another quantization method, which vLLM, transformers and others read.

Each layer is unpacked twice: once to see whether the layout holds its codes and what the header of the file says, and
once to write it. So nothing is written of a model that does not fit, and memory holds the codes of one layer.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit.checkpoints.sharded_files import Part, write_shards
from lowbit.checkpoints.writers import WRITERS, Writer
from lowbit.checkpoints.writers.layers import CheckpointWeights, PackedRows, checkpoint_weights
from lowbit.documents.whole_file import new_folder
from lowbit.quant.safetensors_file import Entry

_GGUF = "gguf"


@torch.no_grad()
def save(
    model: nn.Module, out: str | os.PathLike[str], format: str, *, like: str | os.PathLike[str] | None = None
) -> None:
    """Write a model whose layers lowbit packed as a checkpoint of another quantization method, with the same codes.

    Codes, scales and zero points are those of the model, exactly. Whether activations are rounded is written only to
    "compressed-tensors", for activations with a scale per row. ``LowbitConfig("checkpoint")`` and `load` read the
    folder back; docs/checkpoints.md says which layers fit, and which programs read them. The tokenizer is not written:
    ``tokenizer.save_pretrained(out)``.

    Args:
        model: a model of transformers; for "gguf" see `lowbit.checkpoints.gguf.save`.
        out: the folder to make, which must not exist; for "gguf" the file.
        format: "compressed-tensors", "gptq", "awq" or "gguf".
        like: for "gguf" alone, a GGUF file of the same architecture and tokenizer.

    Raises:
        TypeError: ``model`` is no model of transformers.
        FileExistsError: ``out`` exists.
        ValueError: ``format`` is unknown, or does not hold a layer; the message names the layer, and nothing is
            written. Also if ``like`` is missing for "gguf", or given for others.

    Example:
        >>> lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128), head=None)
        >>> lowbit.save(model, "model-gptq", "gptq")
    """
    if format not in (*WRITERS, _GGUF):
        raise ValueError(f"save: format must be one of {', '.join((*WRITERS, _GGUF))}, got {format!r}")
    if (like is not None) != (format == _GGUF):
        raise ValueError(f"save: like must be a GGUF file for 'gguf', and None for others, got {like!r} for {format!r}")
    if format == _GGUF:
        from lowbit.checkpoints.gguf.saving import save as save_gguf  # needs the package gguf

        return save_gguf(model, out, like)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"save: model must be one of transformers for {format!r}, got {type(model).__name__}")
    if Path(out).exists():
        raise FileExistsError(f"save: out must be a new folder, got {out}")
    weights, writer = checkpoint_weights(model), WRITERS[format](model.dtype)
    parts = [_packed_part(rows, writer) for rows in weights.packed]
    parts += [Part.of(key, value) for key, value in weights.floats.items()]
    with new_folder(out) as folder:
        write_shards(folder, parts, {"format": "pt"})
        _write_configs(model, folder, writer, weights)


def _packed_part(rows: PackedRows, writer: Writer) -> Part:
    """Return the tensors of a layer, after checking that the layout holds its codes."""
    layer = rows.coded()
    writer.add(layer)
    entries = {f"{rows.name}{part}": Entry.of(tensor) for part, tensor in writer.tensors(layer.meta).items()}
    return Part(entries, functools.partial(_tensors, rows, writer))


def _tensors(rows: PackedRows, writer: Writer) -> dict[str, Tensor]:
    return {f"{rows.name}{part}": tensor for part, tensor in writer.tensors(rows.coded()).items()}


def _write_configs(model: PreTrainedModel, folder: Path, writer: Writer, weights: CheckpointWeights) -> None:
    config = copy.deepcopy(model.config)
    config.quantization_config = writer.settings(weights.float_layers)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    for each in (config, config.get_text_config()):
        if getattr(each, "tie_word_embeddings", False) and not _is_tied(model):
            each.tie_word_embeddings = False  # readers would replace the head's codes by the embedding
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _is_tied(model: PreTrainedModel) -> bool:
    """Return whether the output head, if there is one, has the weight of the embedding."""
    head = model.get_output_embeddings()
    held = {id(parameter) for parameter in model.get_input_embeddings().parameters(recurse=False)}
    return head is None or any(id(parameter) in held for parameter in head.parameters(recurse=False))
