# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file, with llama.cpp's results: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

Byte-level: regular expressions split the text (splitting.py), and the bytes of each piece are merged in the order of
the file's merges. SentencePiece: spaces become U+2581, and one is added before each text that follows no token (and
after a special token). Of all neighbours, the two whose union is the token with the highest score are merged first; a
letter that is no token becomes its bytes. Both are BPE in the ``tokenizers`` package. transformers' own conversion is
not used, because it loses the first space of SentencePiece texts and merges tokens that llama.cpp keeps apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.metadata import Metadata
from lowbit.checkpoints.gguf.special_tokens import ENDS, special_tokens
from lowbit.checkpoints.gguf.splitting import SPLITTINGS

_SPACE = "\u2581"


def load_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizer of a file.

    Raises:
        ValueError: the file has no tokenizer, or one of an unsupported kind. The message names the key.
    """
    keys = Metadata(file)
    words = list(file.array_of_texts("tokenizer.ggml.tokens"))
    if not words:
        raise ValueError(f"{file.paths[0]}: tokenizer.ggml.tokens must be the words of the tokenizer, got none")
    if len(set(words)) != len(words):
        raise ValueError(f"{file.paths[0]}: tokenizer.ggml.tokens must be {len(words)} words, got {len(set(words))}")
    kind = keys.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        keys.refuse("tokenizer.ggml.model", "gpt2 or llama", kind)
    tokenizer, begins = (_byte_level if kind == "gpt2" else _sentencepiece)(keys, words)
    _add_words(tokenizer, keys, words)
    numbers = special_tokens(keys, len(words))
    ends = numbers["eos_token_id"]
    roles = {
        "bos_token": numbers["bos_token_id"],
        "eos_token": ends[0] if isinstance(ends, list) else ends,
        "pad_token": numbers["pad_token_id"],
        "unk_token": keys.value("tokenizer.ggml.unknown_token_id", 0 if kind == "llama" else None),
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{role: words[number] for role, number in roles.items() if number is not None and number < len(words)},
        add_bos_token=_flag(keys, "bos", begins, numbers["bos_token_id"]),
        add_eos_token=_flag(keys, "eos", False, roles["eos_token"]),
        chat_template=file.value("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _flag(keys: Metadata, role: str, default: bool, number: int | None) -> bool:
    """Return whether this token is added to a text."""
    added = keys.flag(f"tokenizer.ggml.add_{role}_token", default)
    if added and number is None:
        keys.refuse(f"tokenizer.ggml.{role}_token_id", f"there, since add_{role}_token is true", None)
    return added


def _byte_level(keys: Metadata, words: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = keys.value("tokenizer.ggml.pre", "default")
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        keys.refuse("tokenizer.ggml.pre", f"one of {', '.join(SPLITTINGS)}", name)
    merges = []
    for merge in keys.file.array_of_texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)  # The first part may begin with a space.
        merges.append((merge[:at], merge[at + 1 :]))
    tokenizer = _bpe(keys, words, merges, ignore_merges=splitting.whole_words)
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in splitting.expressions]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins


def _sentencepiece(keys: Metadata, words: Sequence[str]) -> tuple[Tokenizer, bool]:
    scores = keys.file.value("tokenizer.ggml.scores", [])
    if len(scores) < len(words):
        keys.refuse("tokenizer.ggml.scores", f"a score for each of the {len(words)} words", f"{len(scores)} scores")
    unknown = keys.value("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = _bpe(
        keys, words, _merges(words, scores), byte_fallback=True, fuse_unk=False,
        unk_token=words[unknown] if unknown < len(words) else None,
    )  # fmt: skip
    spaces = [normalizers.Replace(" ", _SPACE)]
    shown = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        shown.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(spaces), decoders.Sequence(shown)
    return tokenizer, True


def _bpe(keys: Metadata, words: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(words)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{keys.file.paths[0]}: tokenizer.ggml.merges must be pairs of words, got {error}") from None


def _merges(words: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose union is a token, by descending score of the union."""
    known = set(words)
    ranked = []
    for word, score in zip(words, scores, strict=False):
        for at in range(1, len(word)):
            if word[:at] in known and word[at:] in known:
                ranked.append((score, word[:at], word[at:]))
    ranked.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in ranked]


def _add_words(tokenizer: Tokenizer, keys: Metadata, words: Sequence[str]) -> None:
    """Add the tokens that are recognized before a text is split: control tokens and user-defined ones."""
    types = keys.file.value("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(words))
    special = TokenType.CONTROL, TokenType.UNKNOWN
    strips = "phi-3" in (name := str(keys.file.value("general.name", "")).lower()) or "phi3" in name
    whole = [
        AddedToken(
            word,
            normalized=False,
            special=type in special or word in ENDS,
            rstrip=strips and word not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for word, type in zip(words, types, strict=False)
        if word and (type in (*special, TokenType.USER_DEFINED) or word in ENDS)
    ]
    tokenizer.add_special_tokens([word for word in whole if word.special])
    tokenizer.add_tokens([word for word in whole if not word.special])
