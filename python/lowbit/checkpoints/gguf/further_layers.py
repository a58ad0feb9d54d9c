# SPDX-License-Identifier: Apache-2.0
"""Layers behind those of the model, which predict further tokens and are not read."""

from __future__ import annotations

from typing import Any

from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.metadata import Metadata

_COUNT = "nextn_predict_layers"


def without_further_layers(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Return the number of the model's own layers."""
    further, layers = keys.value(_COUNT, 0), known["num_hidden_layers"]
    if type(further) is not int or not 0 <= further < layers:
        keys.refuse(_COUNT, f"0 to {layers - 1}, of {layers} layers", further)
    return {"num_hidden_layers": layers - further}


def is_of_further_layer(file: GgufFile, tensor: str) -> bool:
    """Return whether a tensor belongs to a layer that predicts further tokens."""
    further = file.value(f"{file.architecture}.{_COUNT}", 0)
    first = file.value(f"{file.architecture}.block_count") - further
    return bool(further) and any(tensor.startswith(f"blk.{first + i}.") for i in range(further))
