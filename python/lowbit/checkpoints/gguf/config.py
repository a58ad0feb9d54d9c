# SPDX-License-Identifier: Apache-2.0
"""The transformers configuration for the metadata of a GGUF file. Every key must be read, or be known to have no
effect."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from lowbit.checkpoints.gguf.architectures import SIZES
from lowbit.checkpoints.gguf.attention_keys import heads_of_all_layers
from lowbit.checkpoints.gguf.expert_keys import expert_attributes
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.metadata import Metadata
from lowbit.checkpoints.gguf.mixtures import architecture_of
from lowbit.checkpoints.gguf.special_tokens import special_tokens

_TOKENIZER = ("model", "pre", "scores", "token_type", "add_bos_token", "add_eos_token", "add_space_prefix")
"""Keys that `load_tokenizer` reads, besides the string arrays and the ids of special tokens."""
_MLP = "feed_forward_length"
_TEXTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration of the model in a file. Raises the errors of `attributes_of`."""
    model_type, attributes = attributes_of(file)
    return AutoConfig.for_model(model_type, **attributes)


def attributes_of(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Return the ``model_type`` of transformers, and the attributes of its configuration that the file sets.

    Raises:
        ValueError: lowbit does not read the architecture, a key is missing, a value is not supported by the
            transformers model, or a key is neither read nor known to have no effect. The message names the file and the
            key.
    """
    architecture = architecture_of(file)
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ValueError(f"{file.paths[0]}: a model must have a tensor token_embd.weight, got none")
    keys = Metadata(file)
    sizes = dict(zip(SIZES, architecture.sizes, strict=True))
    if not architecture.has_dense_mlp:
        keys.count(_MLP, 1)  # marked as read
        del sizes[_MLP]
    values: dict[str, Any] = {attribute: keys.count(key) for key, attribute in sizes.items() if attribute}
    key, attribute = architecture.epsilon
    values[attribute] = keys.positive(key)
    values |= {"vocab_size": table.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    values |= (architecture.heads or heads_of_all_layers)(keys, architecture)
    if architecture.more is not None:
        values |= architecture.more(keys, values)
    values |= special_tokens(keys, table.shape[0])
    keys.only("attention.causal", True, reason="the model continues texts")
    if architecture.experts is not None:
        values |= expert_attributes(keys, values, architecture.experts)
    else:
        for key in ("expert_count", "expert_used_count"):
            keys.only(key, 0, reason="the model has no experts")
    keys.only("tokenizer.ggml.add_sep_token", False, reason="the model continues texts")
    keys.read.update({f"tokenizer.ggml.{key}" for key in _TOKENIZER}, _TEXTS)
    keys.refuse_unread()
    return architecture.model_type, values
