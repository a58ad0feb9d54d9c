# SPDX-License-Identifier: Apache-2.0
"""Float weights in the packed layout: the same kernels and module, no codes and no scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowbit import _C
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec

FLOAT_FORMATS = {getattr(torch, name): name for name, facts in _C.FORMAT_FACTS.items() if facts["kind"] == "float"}
"""The name of a float format is that of its dtype in torch."""


@dataclass(frozen=True, slots=True)
class FloatWeightConfig(FormatConfig):
    """Keep the weight in float, packed for the dense rows.

    Args:
        dtype: torch.float32, torch.bfloat16 or torch.float16; None keeps the dtype of each weight.

    Raises:
        ValueError: an argument has none of the values that it may have; names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.float_weight(torch.bfloat16))
    """

    dtype: torch.dtype | None = None
    function: ClassVar[str] = "float_weight"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOAT_FORMATS:
            names = ", ".join(map(str, FLOAT_FORMATS))
            raise ValueError(f"{self.function}: dtype must be {names} or None, got dtype={self.dtype!r}")

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        return LinearSpec(FLOAT_FORMATS[self.dtype or dtype])


float_weight = FloatWeightConfig
