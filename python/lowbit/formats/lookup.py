# SPDX-License-Identifier: Apache-2.0
"""Weight-only lookup formats of 4 bits: w = scale * level[code].

The levels of nf4 are 16 quantiles of the normal distribution; those of fp4 are floats of one sign bit and three more
bits. Both formats are bitsandbytes' own, and `from_bitsandbytes` converts its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowbit.formats.base import FormatConfig, group_size_of
from lowbit.formats.spec import LinearSpec


@dataclass(frozen=True, slots=True)
class LookupConfig(FormatConfig):
    """Base class of the configurations of lookup formats.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
    """

    group_size: int | None = 64
    format: ClassVar[str]

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        return LinearSpec(self.format, group_size_of(self.function, self.group_size))


class NF4WeightOnlyConfig(LookupConfig):
    """Configuration of nf4 weights with float activations (QLoRA: Dettmers et al., arXiv 2305.14314).

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.nf4_weight_only(group_size=64))
    """

    __slots__ = ()
    function, format = "nf4_weight_only", "nf4"


class FP4WeightOnlyConfig(LookupConfig):
    """Configuration of bitsandbytes' fp4 weights with float activations.

    For normally distributed weights nf4 has the smaller error.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.
    """

    __slots__ = ()
    function, format = "fp4_weight_only", "fp4"


nf4_weight_only = NF4WeightOnlyConfig
fp4_weight_only = FP4WeightOnlyConfig
