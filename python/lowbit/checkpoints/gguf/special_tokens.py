# SPDX-License-Identifier: Apache-2.0
"""The ids of a GGUF file's special tokens: the token that begins a text, and all tokens that end an answer."""

from __future__ import annotations

from typing import Any

from lowbit.checkpoints.gguf.metadata import Metadata

_NONE = 2**32 - 1  # -1 as an unsigned number, which some writers use for "none"
ENDS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"]
)
"""Tokens that end an answer in llama.cpp whenever a vocabulary has them, whatever their type (src/llama-vocab.cpp),
besides those that the file names.

Left out are those of gpt-oss, whose architecture is not supported, padding, and "</s>", which is an HTML tag in
vocabularies that do not name it.
"""
_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE = {"bos": 1, "eos": 2}  # defaults of SentencePiece files


def special_tokens(keys: Metadata, words: int) -> dict[str, Any]:
    """Return ``bos_token_id``, ``pad_token_id`` and ``eos_token_id`` of a configuration. The last is a list if several
    tokens end an answer, with the end of the text first.

    Args:
        keys: the metadata of the file.
        words: the size of the model's vocabulary.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    defaults = _SENTENCEPIECE if keys.value("tokenizer.ggml.model", None) == "llama" else {}

    def number(role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = keys.value(key, defaults.get(role, _NONE))
        if value not in (_NONE, -1) and not (type(value) is int and 0 <= value < words):
            keys.refuse(key, f"a number below {words}, how many words the model has", value)
        return None if value in (_NONE, -1) else value

    number("unknown")
    ends = [end for role in _ROLES if (end := number(role)) is not None]
    texts = keys.file.array_of_texts("tokenizer.ggml.tokens")
    ends += [index for index, word in enumerate(texts) if word in ENDS and index < words]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": number("bos"),
        "pad_token_id": number("padding"),
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
    }
