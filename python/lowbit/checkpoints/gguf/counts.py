# SPDX-License-Identifier: Apache-2.0
"""check_counts: compare the sizes in a file's header with its tensors, before a model is created from them.

A flipped bit in the number of layers would create layers without end, or silently create a smaller model.
"""

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
"""Keys that give the size of a tensor, if the file has that tensor."""
_EXPERTS = {
    "expert_count": ("ffn_gate_inp.weight", 2, 0),
    "expert_feed_forward_length": ("ffn_down_exps.weight", 3, 2),
    "expert_shared_feed_forward_length": ("ffn_down_shexp.weight", 2, 1),
}
"""Keys that give the size of a tensor in the first layer that has it, with its number of dimensions."""
_HEADS = {"attention.head_count": "blk.0.attn_q.weight", "attention.head_count_kv": "blk.0.attn_k.weight"}


def check_counts(
    path: Path, architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the numbers of layers, features and heads in the metadata are those of the tensors.

    Args:
        path: the path of the file, for errors.
        architecture: the prefix of the keys.
        metadata: values by key; missing keys are not checked.
        shapes: the shapes of the tensors by name, rows first.

    Raises:
        ValueError: a number differs. The message names the file and the key.
    """
    layers = {int(found[1]) for name in shapes if (found := _LAYER.fullmatch(name))}
    wanted = {"block_count": (max(layers, default=-1) + 1, "layers have tensors")}
    for key, (name, dimension) in _SIZES.items():
        if len(shapes.get(name, ())) == 2:
            wanted[key] = shapes[name][dimension], f"{name} has"
    for key, (end, dimensions, dimension) in _EXPERTS.items():
        found = ((name, shape) for name, shape in shapes.items() if is_in_layer(name, end))
        name, shape = next(found, ("", ()))
        if len(shape) == dimensions:
            wanted[key] = shape[dimension], f"{name} has"
    for key, (number, reason) in wanted.items():
        got = metadata.get(f"{architecture}.{key}", number)
        is_given_by_layer = isinstance(got, list) and key != "block_count"
        if not is_given_by_layer and (type(got) is not int or got != number):
            raise ValueError(f"{path}: {architecture}.{key} must be {number}, as many as {reason}, got {got!r:.80}")
    _check_heads(path, architecture, metadata, shapes)


def is_in_layer(name: str, end: str) -> bool:
    """Whether a tensor of this name belongs to a layer, where it is named ``end``."""
    return name.startswith("blk.") and name.endswith(f".{end}")


def _check_heads(
    path: Path, architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that heads of queries have as many columns as heads of keys."""
    columns = {}
    queries = metadata.get(f"{architecture}.attention.head_count")
    for key, name in _HEADS.items():
        got = metadata.get(f"{architecture}.{key}", queries)
        if got is None or isinstance(got, list):  # a list has one number per layer
            return
        if name not in shapes and got == 0:  # a model without attention
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
