# SPDX-License-Identifier: Apache-2.0
"""Float weights in the packed layout. Kernels and module are those of quantized weights, without codes or scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowbit import _C
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec

FLOAT_FORMATS = {getattr(torch, name): name for name, facts in _C.FORMAT_FACTS.items() if facts["kind"] == "float"}
"""The float formats by their torch dtypes; both have the same name."""


@dataclass(frozen=True, slots=True)
class FloatWeightConfig(FormatConfig):
    """Configuration of float weights that are packed for the kernels but not quantized.

    Args:
        dtype: torch.float32, torch.bfloat16 or torch.float16; None keeps the dtype of each weight.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

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
