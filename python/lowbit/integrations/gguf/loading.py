# SPDX-License-Identifier: Apache-2.0
"""load_gguf: a causal language model and its tokenizer from a GGUF file alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import (
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from lowbit.integrations.fuse import fuse as fuse_pieces
from lowbit.integrations.gguf.errors import errors_of
from lowbit.integrations.gguf.file import GgufFile
from lowbit.integrations.gguf.weights import ACTIVATIONS, StateReader
from lowbit.quant.load import load


def load_gguf(
    path: str | Path, *, activations: str = "int8", attention: str = "lowbit", fuse: bool = True
) -> tuple[nn.Module, Any]:
    """Return the model and the tokenizer of a GGUF file; its weights are packed with the codes that they have.

    No float model is made: weights are read one by one. Architectures and names are those that transformers' tables
    know; docs/gguf.md has the types of tensors.

    Args:
        path: the file, or the first of one that was split.
        activations: "int8" rounds the inputs of linear layers on the fly, as llama.cpp does; "float" leaves them.
        attention: ``attn_implementation`` of transformers.
        fuse: make the pieces around the linear layers faster, as `lowbit.fuse` does.

    Raises:
        FileNotFoundError, ValueError: the file or a part of it is missing, is cut, or has a tensor without a place in
            the model; names it. Nothing is half loaded.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        >>> tokens = tokenizer("The sea is", return_tensors="pt")
        >>> print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
    """
    model = load_model(path, activations=activations, attention=attention, fuse=fuse)
    with errors_of(path, "the tokenizer"):
        return model, load_tokenizer(Path(path), model.config)


def load_model(
    path: str | Path, *, activations: str = "int8", attention: str = "lowbit", fuse: bool = True
) -> nn.Module:
    """Return the model alone; arguments and errors are those of `load_gguf`."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"load_gguf: activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
    file = GgufFile.open(path)
    with errors_of(path, "the metadata"):
        config = config_of(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    model.tie_weights()
    with errors_of(path, "the weights"):
        load(model, StateReader(file, model, activations).read())
    model.eval()
    if fuse:
        fuse_pieces(model)
    return model


def load_tokenizer(path: Path, config: PreTrainedConfig) -> Any:
    """Return the tokenizer that AutoTokenizer makes of the file, by its class.

    AutoTokenizer itself asks for the configuration first, for which the ``gguf`` package's reader steps over every
    word: 5.6 to 6.6 s instead of 0.4 s for 49,152 of them.
    """
    kind = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    is_of_the_file = isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerFast)
    if not is_of_the_file or (path.parent / "tokenizer_config.json").exists():  # which may name another class
        kind = AutoTokenizer
    return kind.from_pretrained(path.parent, gguf_file=path.name)


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration that transformers makes of the metadata.

    It is given a file of the same header without the vocabulary, over every word of which its reader steps (5 s of a
    Zen 3 for 49,152 of them), and with tensors of the same names.

    Raises:
        ValueError: transformers does not know the architecture.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "header.gguf", file.architecture)
        for key, value in file.metadata.items():
            is_of_words = key.startswith("tokenizer.") and isinstance(value, list)
            if key != "general.architecture" and value != [] and not is_of_words:
                writer.add_key_value(key, value, file.kinds[key])
        for name in file.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf")
    if "token_embd.weight" in file.tensors:
        config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    return config
