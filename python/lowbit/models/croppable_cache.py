# SPDX-License-Identifier: Apache-2.0
"""A cache of a model with recurrent layers that can be cropped, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lowbit.documents.whole_file import replaced_file
from lowbit.models.croppable_states import CroppableStates, LinearAttentionLayer
from lowbit.models.growing_cache import GrowingLayer

_FORMAT = "lowbit.cache"
_PARTS = ("conv", "state")


def croppable_cache(model: nn.Module, every: int = 256) -> DynamicCache:
    """Return an empty cache for a model with recurrent layers, from which tokens can be taken out again.

    transformers refuses to crop recurrent states, and so assisted decoding with such models. This cache keeps the states
    behind every ``every``-th token and, of the last call of the model, what a crop to any of its tokens needs. Pass it
    to ``generate`` as ``past_key_values``: ``assistant_model`` and ``prompt_lookup_num_tokens`` work then, and
    `rewind_cache` goes back to the prefix that a next prompt shares.

    Args:
        model: a model of transformers that `fuse` has changed, with ``attn_implementation="lowbit"``.
        every: after how many tokens states are kept. They take as much memory as the states of one sequence.

    Returns:
        A ``DynamicCache``. Its layers are those of a new one, but for the recurrent ones.

    Raises:
        ValueError: ``every`` is below 1, the model has no recurrent layers, or one whose states cannot be kept. The
            message names it.

    Example:
        >>> cache = lowbit.croppable_cache(model)
        >>> model.generate(**tokens, past_key_values=cache, prompt_lookup_num_tokens=8)
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"croppable_cache: every must be a number of tokens from 1 on, got {every!r}")
    cache = DynamicCache(config=model.config)
    recurrent = [i for i, layer in enumerate(cache.layers) if type(layer) is LinearAttentionLayer]
    served = (LinearAttentionLayer, GrowingLayer)
    others = [(i, layer) for i, layer in enumerate(cache.layers) if type(layer) not in served]
    if others:
        i, layer = others[0]
        raise ValueError(
            "croppable_cache: model must have layers of recurrent states or of lowbit's attention without a window "
            f'(attn_implementation="lowbit"), got a {type(layer).__name__} for layer {i}'
        )
    if not recurrent or any(cache.layers[i].number_of_states != 1 for i in recurrent):
        told = "none" if not recurrent else "layers with several states"
        raise ValueError(f"croppable_cache: model must have recurrent layers with one state each, got {told}")
    for i in recurrent:
        cache.layers[i] = CroppableStates(every)
    return cache


def is_croppable(cache: Any) -> bool:
    """Whether a cache was made by `croppable_cache`."""
    return type(cache) is DynamicCache and any(type(layer) is CroppableStates for layer in cache.layers)


def rewind_cache(cache: DynamicCache, length: int) -> int:
    """Take tokens out of a cache of `croppable_cache`, until at most ``length`` are left.

    Args:
        cache: the cache.
        length: the number of tokens at its beginning that a next prompt shares.

    Returns:
        The number of tokens that are left: the last one behind which the states of all layers can be recalled. It is
        ``length`` within the last call of the model, and otherwise less by at most ``every`` - 1.

    Raises:
        ValueError: the cache is another one, or has fewer tokens. Nothing has changed then.

    Example:
        >>> left = lowbit.rewind_cache(cache, len(shared_prefix))
    """
    layers = _recurrent("rewind_cache", cache)
    held = layers[0].length
    if type(length) is not int or not 0 <= length <= held:
        raise ValueError(f"rewind_cache: length must be from 0 to {held}, the tokens in the cache, got {length!r}")
    left = length
    while (nearest := min(layer.reachable(left) for layer in layers)) < left:
        left = nearest
    cache.crop(left - held)
    return left


def save_cache(cache: DynamicCache, path: str | Path) -> None:
    """Write a cache of `croppable_cache` to a safetensors file: keys, values, and all states that are kept.

    Args:
        cache: the cache, with one token or more.
        path: the file, which is replaced as a whole.

    Raises:
        ValueError: the cache is another one, or empty.
    """
    layers = _recurrent("save_cache", cache)
    if not layers[0].length:
        raise ValueError("save_cache: cache must have tokens, got an empty one")
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if type(layer) is CroppableStates:
            for at, states in layer.states().items():
                for name, state in zip(_PARTS, states, strict=False):
                    tensors[f"{i}.{at}.{name}"] = state.contiguous()
        else:
            tensors |= {f"{i}.keys": layer.keys.contiguous(), f"{i}.values": layer.values.contiguous()}
    kinds = ["recurrent" if type(layer) is CroppableStates else "attention" for layer in cache.layers]
    about = {"format": _FORMAT, "every": str(layers[0].every), "layers": json.dumps(kinds)}
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
    cache = croppable_cache(model, int(about["every"]))
    kinds = ["recurrent" if type(layer) is CroppableStates else "attention" for layer in cache.layers]
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


def _fill(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Give a new layer the tensors of one."""
    if type(layer) is not CroppableStates:
        layer.update(tensors["keys"], tensors["values"])
        return
    lengths = {int(name.partition(".")[0]) for name in tensors}
    names = [name for name in _PARTS if f"{max(lengths)}.{name}" in tensors]
    layer.hold({at: tuple(tensors[f"{at}.{name}"] for name in names) for at in lengths})


def _recurrent(call: str, cache: Any) -> list[CroppableStates]:
    if not is_croppable(cache):
        raise ValueError(f"{call}: cache must be one of lowbit.croppable_cache, got a {type(cache).__name__}")
    return [layer for layer in cache.layers if type(layer) is CroppableStates]
