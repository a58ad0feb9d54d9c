# SPDX-License-Identifier: Apache-2.0
"""load_gguf: a causal language model and its tokenizer from a GGUF file alone."""

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
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.models.fuse import fuse as fuse_pieces
from lowbit.quant.load import load

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_gguf(
    path: str | Path, *, activations: str = "int8", attn_implementation: str = "lowbit", fuse: bool = True
) -> tuple[nn.Module, Any]:
    """Return the model and the tokenizer of a GGUF file; its weights are packed with the codes that they have.

    No float model is made: weights are read one by one. docs/gguf.md has the architectures, what their keys mean, and
    the types of tensors.

    Args:
        path: the file, or the first of one that was split.
        activations: "int8" rounds the inputs of linear layers on the fly, as llama.cpp does; "float" leaves them.
        attn_implementation: the argument of transformers' ``from_pretrained``.
        fuse: make the pieces around the linear layers faster, as `lowbit.fuse` does.

    Raises:
        FileNotFoundError, ValueError: the file or a part of it is missing, is cut, or has a key or a tensor that the
            model has no place for; names it. Nothing is half loaded.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        >>> tokens = tokenizer("The sea is", return_tensors="pt")
        >>> print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
    """
    file, config = _opened(path, activations)
    with errors_of(path, "the tokenizer"):  # before the weights, which take more time
        tokenizer = load_tokenizer(file)
    return _model(file, config, activations, attn_implementation, fuse), tokenizer


def load_model(
    path: str | Path, *, activations: str = "int8", attn_implementation: str = "lowbit", fuse: bool = True
) -> nn.Module:
    """Return the model alone; arguments and errors are those of `load_gguf`."""
    file, config = _opened(path, activations)
    return _model(file, config, activations, attn_implementation, fuse)


def _opened(path: str | Path, activations: str) -> tuple[GgufFile, PreTrainedConfig]:
    if activations not in ACTIVATIONS:
        raise ValueError(f"load_gguf: activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
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
