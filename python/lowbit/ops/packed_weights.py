# SPDX-License-Identifier: Apache-2.0
"""Packed weights as training meets them: they have no gradient, and an optimizer may still hold the floats that they
took the place of."""

from __future__ import annotations

import weakref

from torch import Tensor

WAYS_TO_TRAIN = (
    "three ways to train: adapters beside the packed weight (peft), a float model whose layers round while it trains "
    "(quantize_(model, lowbit.training.QATConfig(config))), or floats again (lowbit.dequantize_(model))"
)
REPLACED: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Float parameters whose places in their layers packed weights have taken, by their ids, as long as they are held."""


def were_replaced(params: list[Tensor]) -> list[Tensor]:
    """Return those of the parameters whose place a packed weight has taken."""
    return [param for param in params if REPLACED.get(id(param)) is param] if REPLACED else []
