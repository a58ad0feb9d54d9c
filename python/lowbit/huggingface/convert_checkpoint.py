# SPDX-License-Identifier: Apache-2.0
"""convert_checkpoint: copy a checkpoint that another package quantized, with its codes in packed weights.

The format of a layer follows from its tensors. So each is read twice: once to check it and to learn what the header of
the new file says, and once to write it. Memory holds the tensors of one layer.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoints.methods.reader import CheckpointReader, QuantizedWeight
from lowbit.checkpoints.names import renamed_key
from lowbit.checkpoints.sharded_files import Part, write_shards
from lowbit.checkpoints.stored_layers import untie
from lowbit.documents.whole_file import new_folder
from lowbit.huggingface.checkpoint_folder import copy_others, write_config
from lowbit.huggingface.config_entry import entry_of
from lowbit.huggingface.quantizer import metadata_of
from lowbit.quant.kinds import is_packed, is_packed_by_default, kind_of, layout_name, weight_named
from lowbit.quant.layout import numbers_of
from lowbit.quant.load import hold_unset
from lowbit.quant.permuted_linear import PERMUTATION
from lowbit.quant.report import QuantizationReport, ReportRow, in_model_order, row_name
from lowbit.quant.safetensors_file import Entry, SafetensorsFile, safetensors_files


def convert_checkpoint(
    source: Path, target: Path, model: nn.Module, settings: dict[str, Any], activations: str | None
) -> QuantizationReport:
    """Write a folder with the packed weights of a checkpoint of another method, and return the report.

    Args:
        source: the folder of the checkpoint.
        target: the folder to make.
        model: its model, on the meta device; the layers become packed ones without values.
        settings: the ``quantization_config`` of the checkpoint.
        activations: the argument of `lowbit.LowbitConfig`.

    Raises:
        ValueError: lowbit does not read the method, or a tensor is missing, truncated or not as the method has it.
            Nothing is written.
    """
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    reader = CheckpointReader(model, safetensors_files(source), settings, activations)
    rows, weights, beside = [], [], {}
    for weight in reader.weights():
        state = weight.read()
        rows.append(_hold(model, weight, state))
        packed = state.pop(weight.name)
        weights.append(Part({weight.key: Entry.of(packed)}, functools.partial(_packed, weight)))
        beside |= {renamed_key(key, {weight.name: weight.key}): value for key, value in state.items()}
    packed_layers = {name for name, module in model.named_modules() if is_packed(module)}
    untie(model, packed_layers)
    parts = [*weights, *(Part.of(key, value) for key, value in beside.items())]  # packed weights on cache lines
    parts += [_copied(key, file) for key, file in reader.homes.items() if key not in reader.read_keys]
    report = QuantizationReport(f"the codes of {settings.get('quant_method')}")
    report.model_bytes_before = sum(
        entry.nbytes for file in set(reader.homes.values()) for entry in file.entries.values()
    )
    report.model_bytes_after = sum(part.nbytes for part in parts)
    left = [
        ReportRow.skipped(name, module, "its weight is float in the checkpoint")
        for name, module in model.named_modules()
        if is_packed_by_default(module) and name not in packed_layers
    ]
    report.rows = in_model_order(model, [*rows, *left])
    with new_folder(target) as folder:
        write_shards(folder, parts, {"format": "pt"} | metadata_of(sorted({row.format for row in rows})))
        copy_others(source, folder)
        write_config(source, folder, entry_of(model).to_dict())
    return report


def _hold(model: nn.Module, weight: QuantizedWeight, state: dict[str, Tensor]) -> ReportRow:
    """Give a layer its packed weight without values, and return its row."""
    path, module, of = weight_named(model, weight.name)
    stored = numbers_of(state[layout_name(weight.name)])
    hold_unset(module, of, stored, state.get(f"{path}.{PERMUTATION}" if path else PERMUTATION))
    kernel = kind_of(module).kernel(module, of, stored.spec, torch.empty(0, dtype=model.dtype, device="cpu"))
    name, after = row_name(path, module, of), state[weight.name].nbytes
    return ReportRow(
        name, stored.spec.name, of.shape, weight.nbytes, after, kernel=kernel, note="the codes of the file"
    )


def _packed(weight: QuantizedWeight) -> dict[str, Tensor]:
    return {weight.key: weight.read()[weight.name]}


def _copied(key: str, file: SafetensorsFile) -> Part:
    return Part({key: file.entries[key]}, lambda: {key: file.read(key)})
