# SPDX-License-Identifier: Apache-2.0
"""The folder of a transformers checkpoint, without its weights: the structure of its model, and what a folder with
packed weights takes from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

from lowbit.documents.whole_file import write_whole
from lowbit.quant.safetensors_file import INDEX

_CONFIG = "config.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
"""Endings of files of weights, which are not copied."""
_SETTINGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files in which other packages describe their codes."""
_ENTRIES = ("quantization_config", "compression_config")


def skeleton_of(source: Path) -> nn.Module:
    """Return the model of a folder on the meta device, with the class that its config names.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: it names no model of transformers.
    """
    if not (source / _CONFIG).is_file():
        raise FileNotFoundError(f"quantize_checkpoint: {source} must be a folder with {_CONFIG} and safetensors files")
    names = json.loads((source / _CONFIG).read_text()).get("architectures") or ["no architecture"]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise ValueError(f"quantize_checkpoint: {_CONFIG} must name a model of transformers, got {names[0]}")
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    with torch.device("meta"):
        return cls(config).to(dtype or torch.float32)


def copy_others(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint that are neither its weights nor their description."""
    described = (_CONFIG, INDEX, *_SETTINGS)
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in described:
            shutil.copy2(path, folder / path.name)


def write_config(source: Path, folder: Path, entry: Mapping[str, Any]) -> None:
    """Write the config.json of a checkpoint with this ``quantization_config``."""
    config = json.loads((source / _CONFIG).read_text())
    for part in (config, config.get("text_config") or {}):
        for name in _ENTRIES:
            part.pop(name, None)
    write_whole(folder / _CONFIG, json.dumps(config | {"quantization_config": dict(entry)}, indent=2))
