# SPDX-License-Identifier: Apache-2.0
"""load_gguf: load a causal language model and its tokenizer from a GGUF file alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowbit.checkpoints.gguf.config import config_of
from lowbit.checkpoints.gguf.errors import errors_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.tokenizer import load_tokenizer
from lowbit.checkpoints.gguf.weights import ACTIVATIONS, StateReader
from lowbit.huggingface.hub_file import file_of
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.models.fuse import fuse as fuse_pieces
from lowbit.quant.load import load

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_gguf(
    path: str | Path,
    file: str | None = None,
    *,
    activations: str = "int8",
    attn_implementation: str = "lowbit",
    fuse: bool = True,
) -> tuple[nn.Module, Any]:
    """Return the model and the tokenizer of a GGUF file. Its weights are packed with the codes they have in the file.

    No float model is created: weights are read one by one. docs/gguf.md lists the supported architectures, the meaning
    of their keys, and the tensor types.

    Args:
        path: the file, or the first part of a split one; or the name of a repository of the Hugging Face Hub,
            ``"owner/name"``, from which huggingface_hub downloads the file into its cache.
        file: which file of a repository: its name, or the part of it that says the quantization, such as ``"Q4_K_M"``;
            None for the only one.
        activations: "int8" rounds the inputs of linear layers on the fly, as llama.cpp does; "float" leaves them.
        attn_implementation: the argument of transformers' ``from_pretrained``.
        fuse: whether to fuse the model with `lowbit.fuse`.

    Returns:
        The model and its tokenizer.

    Raises:
        FileNotFoundError: the file or one of its parts is missing.
        ValueError: the file is truncated, or has a key or a tensor that the model does not support; or a repository has
            no such file, or several. The message names it.
        ConnectionError: the Hub cannot be reached.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        >>> tokens = tokenizer("The sea is", return_tensors="pt")
        >>> print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
    """
    _check_activations(activations)
    path = file_of("load_gguf", path, file)
    opened, config = _opened(path)
    with errors_of(path, "the tokenizer"):  # before the weights, which take longer
        tokenizer = load_tokenizer(opened)
    return _model(opened, config, activations, attn_implementation, fuse), tokenizer


def load_model(
    path: str | Path, *, activations: str = "int8", attn_implementation: str = "lowbit", fuse: bool = True
) -> nn.Module:
    """Return the model alone. Arguments and errors are those of `load_gguf`."""
    _check_activations(activations)
    opened, config = _opened(path)
    return _model(opened, config, activations, attn_implementation, fuse)


def _check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"load_gguf: activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")


def _opened(path: str | Path) -> tuple[GgufFile, PreTrainedConfig]:
    if Path(path).is_dir():
        inside = ", ".join(sorted(file.name for file in Path(path).glob("*.gguf"))) or "none"
        raise IsADirectoryError(
            f"load_gguf: path must be a GGUF file, got the folder {path}; GGUF files in it: {inside}"
        )
    file = GgufFile.open(path)
    with errors_of(path, "the metadata"):
        return file, config_of(file)


def _model(
    file: GgufFile, config: PreTrainedConfig, activations: str, attn_implementation: str, fuse: bool
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    model.tie_weights()
    model.config.quantization_config = LowbitConfig("gguf", activations=activations, fuse=fuse)
    with errors_of(file.paths[0], "the weights"):
        load(model, StateReader(file, model, activations).read())
    model.eval()
    if fuse:
        fuse_pieces(model)
    return model
