# SPDX-License-Identifier: Apache-2.0
"""Choose the format of the KV cache that holds the bound on the keys and values that a decoder returned.

A plan cannot put it into the model: the cache is an argument of each call. The plan names the cache to hand over.
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
        format: "int8" or "int4" of `lowbit.QuantizedKVCache`, or "float": neither holds the bound.
        error_db: the min SQNR of the keys and of the values of a layer by format, in dB.
        bytes: the bytes of the recorded tokens by format.
    """

    format: str
    error_db: dict[str, float]
    bytes: dict[str, int]


def choose_cache(cache: Any, bound_db: float) -> CacheChoice | None:
    """Return the smallest format that holds the bound; None if ``cache`` is none of transformers' caches or is empty.

    Args:
        cache: a model's ``past_key_values``: layers with ``keys`` and ``values`` [B, H, L, E].
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
