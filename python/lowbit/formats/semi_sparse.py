# SPDX-License-Identifier: Apache-2.0
"""int8 weights of which two of each four neighbours along k are 0 (2:4): with float activations, and with int8 ones.

Panels hold the two codes that are kept and their positions, 5 bits per weight.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.formats.base import FormatConfig, MappingType, group_size_of, integer_spec
from lowbit.formats.spec import LinearSpec

FORMAT = "int8_semi_sparse"


def fullest_four(matrix: Tensor, zero: int = 0) -> tuple[int, int, int] | None:
    """Return (row, first of four columns, how many are not ``zero``) of the fullest four of ``[n, k]``, or None where
    the matrix is 2:4."""
    counts = (matrix.unflatten(1, (-1, 4)) != zero).sum(2)
    if not counts.numel() or int(counts.max()) <= 2:
        return None
    row, four = divmod(int(counts.argmax()), counts.shape[1])
    return row, 4 * four, int(counts.max())


@dataclass(frozen=True, slots=True)
class SemiSparseWeightConfig(FormatConfig):
    """Store two of each four neighbouring weights, the larger ones, as int8; activations stay float.

    torchao's of this name keeps the dtype of the weight; kept weights are int8 here.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        scale: "absmax" takes the scale of each group's range, "search" the one with the least error; None is absmax.
        pruned: the weights are 2:4 already, and one that is not is an error. False: the smaller two of each four
            become 0.

    Raises:
        TypeError: pruned is no bool.
        ValueError: an argument has none of the values that it may have; names it.

    Example:
        >>> lowbit.sparsify_(model, lowbit.semi_sparse_weight())
    """

    group_size: int | None = None
    _: KW_ONLY
    scale: str | None = None
    pruned: bool = False
    function: ClassVar[str] = "semi_sparse_weight"
    x_format: ClassVar[tuple[str, str]] = ("float", "float")
    """How activations enter, of weights without groups and with them."""

    def spec(self, dtype: torch.dtype) -> LinearSpec:
        if not isinstance(self.pruned, bool):
            raise TypeError(f"{self.function}: pruned must be True or False, got pruned={self.pruned!r}")
        group_size = group_size_of(self.function, self.group_size)
        x_format = self.x_format[group_size > 0]
        return integer_spec(self.function, FORMAT, group_size, MappingType.SYMMETRIC, x_format, scale=self.scale)

    def refuses(self, weight: Tensor) -> str:
        k = weight.shape[1]
        if k % 4:
            return f"must have in_features in fours for {self}, got in_features={k}"
        full = None if weight.is_meta or not self.pruned else fullest_four(weight)
        if full is None:
            return ""
        row, column, count = full
        return f"must be 2:4 for {self}, got {count} of [{row}, {column}:{column + 4}] that are not 0"


semi_sparse_weight = SemiSparseWeightConfig


@dataclass(frozen=True, slots=True)
class Int8DynamicActivationInt8SemiSparseWeightConfig(SemiSparseWeightConfig):
    """Store two of each four neighbouring weights, the larger ones, as int8, and multiply them with activations that
    are rounded to int8 on the fly.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        scale: "absmax" takes the scale of each group's range, "search" the one with the least error; None is absmax.
        pruned: the weights are 2:4 already, and one that is not is an error. False: the smaller two of each four
            become 0.

    Raises:
        TypeError: pruned is no bool.
        ValueError: an argument has none of the values that it may have; names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_semi_sparse_weight())
    """

    function: ClassVar[str] = "int8_dynamic_activation_int8_semi_sparse_weight"
    x_format: ClassVar[tuple[str, str]] = ("int8_row", "int8_group")


int8_dynamic_activation_int8_semi_sparse_weight = Int8DynamicActivationInt8SemiSparseWeightConfig
