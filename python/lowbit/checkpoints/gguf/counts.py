# SPDX-License-Identifier: Apache-2.0
"""check_counts: the numbers of a file's header against its tensors, before a model is made of them. A flipped bit in
the number of layers would create layers forever, or silently make a smaller model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"blk\.(\d{1,9})\..+")
_SIZES = {
    "embedding_length": ("token_embd.weight", 1),
    "context_length": ("position_embd.weight", 0),
    "feed_forward_length": ("blk.0.ffn_down.weight", 1),
}
"""Keys that are a size of a tensor, if the file has it."""
_HEADS = {"attention.head_count": "blk.0.attn_q.weight", "attention.head_count_kv": "blk.0.attn_k.weight"}


def check_counts(
    path: Path, architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a file whose numbers of layers, features or heads are not those of its tensors.

    Args:
        path: the path of the file, for errors.
        architecture: the prefix of its keys.
        metadata: values by key; one that is not there is not compared.
        shapes: the shapes of the tensors by name, rows first.

    Raises:
        ValueError: names the file and the key.
    """
    layers = {int(found[1]) for name in shapes if (found := _LAYER.fullmatch(name))}
    wanted = {"block_count": (max(layers, default=-1) + 1, "layers have tensors")}
    for key, (name, dimension) in _SIZES.items():
        if len(shapes.get(name, ())) == 2:
            wanted[key] = shapes[name][dimension], f"{name} has"
    for key, (number, reason) in wanted.items():
        got = metadata.get(f"{architecture}.{key}", number)
        is_given_by_layer = isinstance(got, list) and key != "block_count"
        if not is_given_by_layer and (type(got) is not int or got != number):
            raise ValueError(f"{path}: {architecture}.{key} must be {number}, as many as {reason}, got {got!r:.80}")
    _check_heads(path, architecture, metadata, shapes)


def _check_heads(
    path: Path, architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Heads of queries have as many columns as heads of keys."""
    columns = {}
    queries = metadata.get(f"{architecture}.attention.head_count")
    for key, name in _HEADS.items():
        got = metadata.get(f"{architecture}.{key}", queries)
        if got is None or isinstance(got, list):  # one for each layer
            return
        if type(got) is not int or got < 1:
            raise ValueError(f"{path}: {architecture}.{key} must be a number from 1 on, got {got!r:.80}")
        if name not in shapes:
            return
        rows = shapes[name][0]
        if rows % got:
            raise ValueError(f"{path}: {architecture}.{key} must divide the {rows} rows of {name}, got {got}")
        columns[name] = rows // got
    if len(set(columns.values())) > 1:
        told = ", ".join(f"{count} columns of {name}" for name, count in columns.items())
        raise ValueError(f"{path}: heads of queries and keys must have as many columns, got {told}")
