# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits whose codes are looked up, weight-only: w = scale * level[code]. nf4 has 16 quantiles of the normal
distribution, fp4 a sign and three bits of float; both are bitsandbytes', whose weights `from_bitsandbytes` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowbit.formats.base import FormatConfig, group_size_of
from lowbit.formats.spec import LinearSpec


@dataclass(frozen=True, slots=True)
class LookupConfig(FormatConfig):
    """Base of the configurations of lookup formats.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
    """

    group_size: int | None = 64
    format: ClassVar[str]

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        return LinearSpec(self.format, group_size_of(self.function, self.group_size))


class NF4WeightOnlyConfig(LookupConfig):
    """Store the weight as nf4 (QLoRA); activations stay float.

    Raises:
        ValueError: an argument has none of the values that it may have; names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.nf4_weight_only(group_size=64))
    """

    __slots__ = ()
    function, format = "nf4_weight_only", "nf4"


class FP4WeightOnlyConfig(LookupConfig):
    """Store the weight as bitsandbytes' fp4; activations stay float. nf4 is nearer to normal weights."""

    __slots__ = ()
    function, format = "fp4_weight_only", "fp4"


nf4_weight_only = NF4WeightOnlyConfig
fp4_weight_only = FP4WeightOnlyConfig
