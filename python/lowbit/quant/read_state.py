# SPDX-License-Identifier: Apache-2.0
"""read_state: read the state dict of a file or folder, mapped or in memory, with clear errors for any other file.

A mapped file must not change while its tensors exist. The safetensors package replaces a file when it writes it, but
torch.save overwrites it, which kills a process that has it mapped (SIGBUS). So safetensors files are mapped by default,
and files of torch.save are read into memory.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.quant.mapped_file import mapped_tensors
from lowbit.quant.safetensors_file import SafetensorsFile, shards_of

_INDEX_OR_FILE = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def read_state(path: Path, mmap: bool | None = None) -> dict[str, Tensor]:
    """Return the state dict of a file, or of the folder of a checkpoint.

    Args:
        path: a safetensors file, a file of torch.save, an index of such files, or a folder.
        mmap: map the file (True) or read it into memory (False); None maps only safetensors files.

    Raises:
        FileNotFoundError: the file does not exist, or the folder has no such file.
        ValueError: the file is of another type or damaged; the message names it.
    """
    if path.is_dir():
        found = next((path / name for name in _INDEX_OR_FILE if (path / name).exists()), None)
        if found is None:
            raise FileNotFoundError(f"load: {path} must hold one of {', '.join(_INDEX_OR_FILE)}, and has none")
        path = found
    if not path.exists():
        raise FileNotFoundError(f"load: {path} must be a file or a folder, and does not exist{_of_hub(path)}")
    if path.name.endswith(".index.json"):
        parts = [read_state(path.parent / part, mmap) for part in shards_of(path)]
        return {name: tensor for part in parts for name, tensor in part.items()}
    return _safetensors(path, mmap is not False) if path.suffix == ".safetensors" else _torch_save(path, bool(mmap))


def _of_hub(path: Path) -> str:
    if len(path.parts) != 2 or path.is_absolute() or path.parent.exists():
        return ""
    return (
        "; a model of the Hugging Face Hub is loaded by from_pretrained, or as the folder that "
        "huggingface_hub.snapshot_download makes"
    )


def _safetensors(path: Path, mmap: bool) -> dict[str, Tensor]:
    file = SafetensorsFile(path)
    state = mapped_tensors(path) if mmap else {name: file.read(name) for name in file.entries}
    # safetensors' save_model stores a shared tensor under one name, and the other names in the metadata.
    return state | {name: state[kept] for name, kept in file.metadata.items() if kept in state and name not in state}


def _torch_save(path: Path, mmap: bool) -> dict[str, Tensor]:
    wanted = f"load: {path} must be a .safetensors file, or one of torch.save(model.state_dict())"
    state = unpickled(path, wanted, mmap=mmap)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"load: {path} must hold a state dict of tensors; save model.state_dict()")
    return dict(state)


def unpickled(path: str | os.PathLike[str], wanted: str, *, mmap: bool = False) -> Any:
    """Return the contents of a file of torch.save, if it has only tensors and plain values.

    Args:
        path: the file.
        wanted: the beginning of the error message, which a description of the file completes.
        mmap: the argument of torch.load.

    Raises:
        ValueError: the file is of another type, is damaged, or contains other objects.
    """
    with open(path, "rb") as file:
        head = file.read(8)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:  # for a damaged file, the unpickler may raise anything
        raise ValueError(f"{wanted}, got {_told(head, error)}") from error


def _told(head: bytes, error: Exception) -> str:
    """Return a description of a file that torch cannot load."""
    if head.startswith(b"GGUF"):
        return "a GGUF file, which lowbit.load_gguf reads"
    if not head.startswith((b"PK", b"\x80")):
        return f"a file that begins with {head!r}"
    found = re.search(r"GLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and found:
        return f"a pickled {found[1]}: save its state_dict()"
    return f"one that torch.load refuses: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
