# SPDX-License-Identifier: Apache-2.0
"""batches_of: strings and rows of datasets among the inputs of a calibration, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

WINDOW = 512  # tokens


def batches_of(given: Iterable[Any], tokenizer: Callable[..., Any] | None) -> Iterator[Any]:
    """Yield the inputs, with windows of tokens in place of text.

    Args:
        given: inputs. A string, a list of strings or a mapping with such an entry "text" is text. A mapping whose
            "input_ids" are a list of numbers, such as a row of a dataset, becomes a batch of one. Others are yielded
            unchanged.
        tokenizer: a tokenizer of transformers, or None.

    Raises:
        ValueError: there is text, and no tokenizer.
    """
    for item in given:
        texts = _texts_in(item)
        ids = item.get("input_ids") if isinstance(item, Mapping) else None
        if ids is not None and _is_list_of(int, ids):
            yield {name: torch.tensor([item[name]]) for name in ("input_ids", "attention_mask") if name in item}
        elif texts is None:
            yield item
        elif tokenizer is None:
            raise ValueError(f"calibrate: tokenizer must be given for batches of text, got None and {texts[0][:40]!r}")
        else:
            for text in texts:
                yield from ({"input_ids": part} for part in _tokens(tokenizer, text).split(WINDOW, 1))


def _texts_in(item: Any) -> list[str] | None:
    """Return the texts of an input, or None if it is not text."""
    value = item.get("text") if isinstance(item, Mapping) and "input_ids" not in item else item
    if isinstance(value, str):
        return [value]
    return list(value) if _is_list_of(str, value) else None


def _is_list_of(cls: type, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(part, cls) for part in value)


def _tokens(tokenizer: Callable[..., Any], text: str) -> torch.Tensor:
    """Return the tokens of a text, int64 ``[1, tokens]``."""
    ids = tokenizer(text)["input_ids"]
    return torch.tensor([ids], dtype=torch.int64)
