# SPDX-License-Identifier: Apache-2.0
"""Choice of a KV cache format that satisfies the bound for the keys and values that a decoder returned.

A plan cannot install the cache in the model, because it is an argument of each call. So the plan only names the cache
to pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowbit.attention.kv_layer import FORMATS, QuantizedKVLayer
from lowbit.autotune.options import sqnr_db

FLOAT = "float"


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """The format for the KV cache of a decoder.

    Args:
        format: "int8" or "int4" for `lowbit.QuantizedKVCache`, or "float" if neither satisfies the bound.
        error_db: for each format, the min SQNR in dB over the keys and values of all layers.
        bytes: for each format, the size of the recorded tokens in bytes.
    """

    format: str
    error_db: dict[str, float]
    bytes: dict[str, int]


def choose_cache(cache: Any, bound_db: float) -> CacheChoice | None:
    """Return the smallest format that satisfies the bound, or None if ``cache`` is not a cache of transformers or is
    empty.

    Args:
        cache: a model's ``past_key_values``, whose layers have ``keys`` and ``values`` ``[B, H, L, E]``.
        bound_db: the min SQNR in dB.
    """
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in getattr(cache, "layers", ())]
    pairs = [pair for pair in pairs if all(isinstance(it, Tensor) and it.dim() == 4 and it.numel() for it in pair)]
    if not pairs:
        return None
    errors, sizes = {}, {FLOAT: sum(key.nbytes + value.nbytes for key, value in pairs)}
    for format in FORMATS:
        errors[format], sizes[format] = float("inf"), 0
        for key, value in pairs:
            layer = QuantizedKVLayer(format)
            layer.append(key, value)
            errors[format] = min(errors[format], sqnr_db(key, layer.keys()), sqnr_db(value, layer.values()))
            sizes[format] += layer.nbytes
    holding = [format for format in FORMATS if errors[format] >= bound_db]
    return CacheChoice(min(holding, key=sizes.__getitem__, default=FLOAT), errors, sizes)
