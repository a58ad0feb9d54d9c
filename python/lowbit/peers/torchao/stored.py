# SPDX-License-Identifier: Apache-2.0
"""Files that torchao wrote (torchao.prototype.safetensors, save_pretrained of transformers), read without torchao.

A weight ``0.weight`` of a tensor class is stored as its component tensors, ``0._weight_qdata``, ``0._weight_scale`` and
so on. Its other attributes are JSON in the metadata of the file, under the weight's name:
    {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
     "act_quant_kwargs": null}, "_tensor_data_names": ["qdata", "scale"]}
``tensor_names`` is the list of all names; a plain tensor has the type "Tensor". All shards have the same metadata, and
the components of a weight may be in two of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowbit.quant.safetensors_file import SafetensorsFile, safetensors_files


class Stored(SimpleNamespace):
    """The attributes of a torchao object read from a file. The object's class is a subclass with the name of
    torchao's."""


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor | Stored]]:
    """Yield every tensor of a file or folder with its name. Tensors of torchao's classes are `Stored`, assembled one at
    a time.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: torchao did not write it, a component of a weight is missing, or a dtype does not exist in torch.
    """
    files = safetensors_files(folder)
    homes: dict[str, SafetensorsFile] = {}
    told: dict[str, str] = {}
    for file in map(SafetensorsFile, files):
        homes |= dict.fromkeys(file.entries, file)
        told |= file.metadata
    if "tensor_names" not in told:
        raise ValueError(f"from_torchao: {folder} must be safetensors of torchao, got no tensor_names in its metadata")
    parts: set[str] = set()
    for name in json.loads(told["tensor_names"]):
        facts = json.loads(told[name])
        if facts["_type"] == "Tensor":
            continue
        path, _, last = name.rpartition(".")
        keys = {part: f"{path}._{last}_{part}" for part in facts["_tensor_data_names"]}
        missing = [key for key in keys.values() if key not in homes]
        if missing:
            raise ValueError(f"from_torchao: {folder} must hold every part of {name}, got no {', '.join(missing)}")
        parts.update(keys.values())
        stored = _object(facts)
        vars(stored).update({part: homes[key].read(key) for part, key in keys.items()})
        yield name, stored
    for name, file in homes.items():
        if name not in parts:
            yield name, file.read(name)


def _object(told: Any) -> Any:
    """Return the value of this JSON: dtypes as torch's, enums as the names of their values, objects as `Stored`."""
    if isinstance(told, list):
        return [_object(item) for item in told]
    if not isinstance(told, dict) or "_type" not in told:
        return told
    kind, data = told["_type"], told["_data"]
    if kind == "torch.dtype":
        dtype = getattr(torch, str(data), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"from_torchao: the metadata must name dtypes of torch, got {data!r}")
        return dtype
    if not isinstance(data, dict):
        return data
    return type(kind, (Stored,), {})(**{name: _object(value) for name, value in data.items()})
