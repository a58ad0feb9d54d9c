# SPDX-License-Identifier: Apache-2.0
"""The metadata of a GGUF file, read by key.

A file with a key that is neither read nor known to have no effect is refused, because such a key may change the
results.
"""

from __future__ import annotations

import math
import re
from typing import Any

from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.tables.folding import first_five

WITHOUT_EFFECT = {
    "describes the file": r"general\.(type|name|author|version|organization|finetune|basename|description|quantized_by"
    r"|size_label|parameter_count|license|license\..*|url|doi|uuid|repo_url|source\..*|base_model\..*|dataset\..*"
    r"|datasets|tags|languages)",
    "is read with the header": r"general\.(architecture|alignment)|split\..*",
    "says what each tensor says": r"general\.(file_type|quantization_version)|ARCH\.(vocab_size|tensor_data_layout)",
    "is a default of llama.cpp's programs; generate takes its caller's": r"general\.sampling\..*",
    "says how the file was made": r"(quantize\.)?imatrix\..*|mradermacher\..*",
    "says how the model was trained": r"ARCH\.rope\.scaling\.finetuned",
    "is for embeddings of texts": r"ARCH\.pooling_type",
    "is a template beside the one that is taken": r"tokenizer\.chat_template\..+|tokenizer\.chat_templates",
    "repeats the vocabulary": r"tokenizer\.huggingface\.json",
    "names a word that a caller puts into a prompt": r"tokenizer\.ggml\."
    r"(fim_(pre|suf|mid)|prefix|suffix|middle|seperator|cls|mask)_token_id",
    "is of other tokenizers": r"tokenizer\.ggml\.(token_type_count|remove_extra_whitespaces|precompiled_charsmap)",
}
"""Patterns of keys that have no effect, by the reason. ARCH stands for the architecture."""
BY_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "attention.sliding_window_pattern",
)
"""Keys of the architecture that may have one value per layer, as in llama.cpp."""
_REQUIRED = object()


class Metadata:
    """The metadata of a file. Each method records that its key was read.

    Keys of the architecture are given without their prefix: for a Llama, ``count("block_count")`` reads
    ``llama.block_count``.

    Raises:
        ValueError: a key is missing and has no default, or its value is invalid. The message names the file and the
            key.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file, self.read = file, set[str]()

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the value. If it is a list with the same number for each layer, return that number."""
        name, key = key, key if key.startswith("tokenizer.") else f"{self.file.architecture}.{key}"
        self.read.add(key)
        value = self.file.value(key, default)
        if value is _REQUIRED:
            raise ValueError(f"{self.file.paths[0]}: {key} must be in the metadata, got none")
        if not isinstance(value, list) or key.startswith("tokenizer."):
            return value
        layers = self.file.metadata.get(f"{self.file.architecture}.block_count")
        if name not in BY_LAYER:
            self.refuse(name, "one value", value)
        if len(value) != layers:
            self.refuse(name, f"one value, or one for each of the {layers} layers", value)
        return value[0] if all(one == value[0] for one in value) else value

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.value(key, default)
        if value is not default and (type(value) is not int or value < 1):
            self.refuse(key, "one number from 1 on", value)
        return value

    def by_layer(self, key: str) -> list[int]:
        """Return the value of each layer, a number from 0 on."""
        value, layers = self.value(key), self.count("block_count")
        numbers = value if isinstance(value, list) else [value] * layers
        if any(type(number) is not int or number < 0 for number in numbers):
            self.refuse(key, "a number from 0 on, or one for each layer", value)
        return numbers

    def positive(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.value(key, default)
        if value is not default and (type(value) not in (int, float) or not 0 < value < math.inf):
            self.refuse(key, "a number above 0", value)
        return value if value is default else float(value)

    def positive_or_none(self, key: str) -> float | None:
        """Return the value, or None if it is missing or 0."""
        return self.positive(key) if self.value(key, 0.0) != 0 else None

    def sections(self, key: str) -> list[int]:
        """Return the first three of a list of numbers of columns, those of time, height and width."""
        key = f"{self.file.architecture}.{key}"
        self.read.add(key)
        value = self.file.value(key, None)
        if not isinstance(value, list) or len(value) < 3 or any(type(one) is not int or one < 0 for one in value):
            self.refuse(key.removeprefix(f"{self.file.architecture}."), "a list of three numbers from 0 on", value)
        return value[:3]

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if type(value) is not bool:
            self.refuse(key, "true or false", value)
        return value

    def only(self, key: str, *values: Any, reason: str) -> None:
        """Check that a key, if present, has one of ``values``, which all have no effect."""
        value = self.value(key, values[0])
        if value not in values:
            self.refuse(key, " or ".join(map(repr, values)), value, reason)

    def refuse(self, key: str, wanted: str, got: Any, reason: str = "") -> None:
        key = key if key.startswith("tokenizer.") else f"{self.file.architecture}.{key}"
        raise ValueError(f"{self.file.paths[0]}: {key} must be {wanted}{reason and f' ({reason})'}, got {got!r:.80}")

    def refuse_unread(self) -> None:
        """Raise ValueError if a key was not read and is not in `WITHOUT_EFFECT`."""
        patterns = "|".join(WITHOUT_EFFECT.values()).replace("ARCH", re.escape(self.file.architecture))
        known = re.compile(f"(?:{patterns})")
        keys = self.file.metadata.keys() | self.file.texts.keys()
        if unread := sorted(key for key in keys - self.read if not known.fullmatch(key)):
            raise ValueError(
                f"{self.file.paths[0]}: every key must be one that lowbit reads for {self.file.architecture} or knows "
                f"to be without effect (docs/gguf.md), got {first_five(unread)}"
            )
