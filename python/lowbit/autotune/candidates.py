# SPDX-License-Identifier: Apache-2.0
"""The configurations that autoquant tries: those of the caller, or by default all of `FORMATS` except the 2:4 sparse
ones, which prune weights and must be requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowbit.formats import FORMATS
from lowbit.formats.base import FormatConfig
from lowbit.formats.float import FloatWeightConfig
from lowbit.formats.int4 import Int4WeightOnlyConfig, Int8DynamicActivationInt4WeightConfig
from lowbit.formats.int8 import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from lowbit.formats.semi_sparse import SemiSparseWeightConfig
from lowbit.formats.text import config_of
from lowbit.formats.torchao import from_torchao

_TORCHAO_CLASSES: dict[str, FormatConfig | None] = {
    "AQDefaultLinearWeight": None,  # the float layer, which is always a candidate
    "AQInt8WeightOnlyQuantizedLinearWeight": Int8WeightOnlyConfig(),
    "AQInt8WeightOnlyQuantizedLinearWeight2": Int8WeightOnlyConfig(),
    "AQInt8WeightOnlyQuantizedLinearWeight3": Int8WeightOnlyConfig(),
    "AQInt8DynamicallyQuantizedLinearWeight": Int8DynamicActivationInt8WeightConfig(),
    "AQInt4G32WeightOnlyQuantizedLinearWeight": Int4WeightOnlyConfig(32),
    "AQInt4G64WeightOnlyQuantizedLinearWeight": Int4WeightOnlyConfig(64),
    "AQInt4G128WeightOnlyQuantizedLinearWeight": Int4WeightOnlyConfig(128),
    "AQInt4G256WeightOnlyQuantizedLinearWeight": Int4WeightOnlyConfig(256),
    "AQFloat32LinearWeight": FloatWeightConfig(torch.float32),
    "AQBFloat16LinearWeight": FloatWeightConfig(torch.bfloat16),
    "AQFloat16LinearWeight": FloatWeightConfig(torch.float16),
}
"""The classes of torchao 0.16's autoquant, with the equivalent configurations of lowbit."""


def default_candidates() -> tuple[FormatConfig, ...]:
    """Return every format except 2:4 with its defaults, bfloat16, and W4A8 in groups of 128, which is faster than
    groups of 32 on AMX (docs/measured/linear.md)."""
    dense = (cls() for cls in FORMATS if not issubclass(cls, SemiSparseWeightConfig))
    return _distinct([*dense, FloatWeightConfig(torch.bfloat16), Int8DynamicActivationInt4WeightConfig(128)])


def candidates_of(candidates: Any, qtensor_class_list: Any) -> tuple[FormatConfig, ...]:
    """Return the configurations that the caller passed, under either name of the argument, or the default ones.

    Raises:
        TypeError: an item is not a configuration of lowbit or torchao.
        ValueError: the sequence is empty, or both arguments were passed.
    """
    if candidates is not None and qtensor_class_list is not None:
        raise ValueError("autoquant: candidates must be None with qtensor_class_list, torchao's name for it, got both")
    given = qtensor_class_list if candidates is None else candidates
    name = "qtensor_class_list" if candidates is None else "candidates"
    if given is None:
        return default_candidates()
    given = [given] if isinstance(given, (FormatConfig, str)) else given
    if not isinstance(given, Sequence):
        raise TypeError(f"autoquant: {name} must be a sequence of configurations, got {type(given).__name__}")
    if not given:
        raise ValueError(f"autoquant: {name} must hold a configuration, got none")
    return _distinct([config for item in given if (config := _config(name, item)) is not None])


def _config(name: str, item: Any) -> FormatConfig | None:
    if isinstance(item, type) and item.__name__ in _TORCHAO_CLASSES:
        return _TORCHAO_CLASSES[item.__name__]
    try:
        config = config_of(item) if isinstance(item, str) else from_torchao(item)
    except (TypeError, ValueError) as error:
        raise type(error)(f"autoquant: {name}: {str(error).removeprefix('quantize_: ')}") from error
    if not isinstance(config, FormatConfig):
        got = item.__name__ if isinstance(item, type) or callable(item) else type(item).__name__
        raise TypeError(f"autoquant: {name} must hold configurations such as lowbit.int8_weight_only(), got {got}")
    return config


def _distinct(configs: Sequence[FormatConfig]) -> tuple[FormatConfig, ...]:
    """Return the configurations without those that produce the same spec for float32 weights."""
    return tuple({config.spec(torch.float32): config for config in configs}.values())
