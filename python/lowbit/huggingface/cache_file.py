# SPDX-License-Identifier: Apache-2.0
"""Files of caches with recurrent states: safetensors with all states that are kept, keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lowbit.documents.whole_file import replaced_file
from lowbit.models.croppable_cache import croppable_cache, recurrent_layers_of
from lowbit.models.croppable_states import CroppableStates
from lowbit.models.growing_cache import GrowingLayer
from lowbit.models.recurrent_layers import STATE_DTYPES

_FORMAT = "lowbit.cache"
_PARTS = ("conv", "state")


def save_cache(cache: DynamicCache, path: str | Path) -> None:
    """Write a cache of `croppable_cache` to a safetensors file: keys, values, and all states that are kept.

    Args:
        cache: the cache, with one token or more.
        path: the file, which is replaced as a whole.

    Raises:
        ValueError: the cache is another one, or empty.
    """
    layers = recurrent_layers_of("save_cache", cache)
    if not layers[0].length:
        raise ValueError("save_cache: cache must have tokens, got an empty one")
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, CroppableStates):
            for at, states in layer.states().items():
                for name, state in zip(_PARTS, states, strict=False):
                    tensors[f"{i}.{at}.{name}"] = state.contiguous()
        if isinstance(layer, GrowingLayer):
            tensors |= {f"{i}.keys": layer.keys.contiguous(), f"{i}.values": layer.values.contiguous()}
    kinds = [_kind_of(layer) for layer in cache.layers]
    about = {"format": _FORMAT, "every": str(layers[0].every), "layers": json.dumps(kinds)}
    about["state_dtype"] = str(layers[0].state_dtype).removeprefix("torch.")
    with replaced_file(path) as place:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, place, about)


def load_cache(model: nn.Module, path: str | Path) -> DynamicCache:
    """Return the cache that `save_cache` wrote, with the same bits.

    Args:
        model: a model with the layers of the one that the cache is of, as for `croppable_cache`.
        path: the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is no file of `save_cache`, or of a model with other layers. The message names the file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"load_cache: path must be a file, got {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"load_cache: {path} must be a safetensors file, got one that is not: {error}") from None
    if about.get("format") != _FORMAT:
        raise ValueError(f"load_cache: {path} must be a file of save_cache, got format {about.get('format')!r}")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}
    if (told := about.get("state_dtype", "float32")) not in dtypes:
        raise ValueError(f"load_cache: {path} must have states of {' or '.join(dtypes)}, got {told!r}")
    cache = croppable_cache(model, int(about["every"]), dtypes[told])
    kinds = [_kind_of(layer) for layer in cache.layers]
    if kinds != (told := json.loads(about["layers"])):
        raise ValueError(f"load_cache: {path} must be of a model with the layers {kinds}, got {told}")
    try:
        for i, layer in enumerate(cache.layers):
            _fill(layer, {name.partition(".")[2]: each for name, each in tensors.items() if name.startswith(f"{i}.")})
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"load_cache: {path} must hold the states of every layer, got a damaged one: {error}"
        ) from None
    return cache


def _kind_of(layer: Any) -> str:
    """Return what a layer of a cache keeps, as files name it."""
    kinds = {"recurrent": CroppableStates, "attention": GrowingLayer}
    return " and ".join(kind for kind, cls in kinds.items() if isinstance(layer, cls)) or "nothing"


def _fill(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Give a new layer the tensors of one."""
    if isinstance(layer, CroppableStates):
        lengths = {int(name.partition(".")[0]) for name in tensors if "." in name}
        names = [name for name in _PARTS if f"{max(lengths)}.{name}" in tensors]
        layer.hold({at: tuple(tensors[f"{at}.{name}"] for name in names) for at in lengths})
    if isinstance(layer, GrowingLayer):
        layer.update(tensors["keys"], tensors["values"])
