# SPDX-License-Identifier: Apache-2.0
"""int8 weights with 2:4 sparsity (two of every four consecutive weights along k are 0), with float or int8 activations.

A panel holds the two nonzero codes of every four weights and their positions: 5 bits per weight.
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
    """Return (row, first column, count) of the four columns of ``[n, k]`` with the max count of values other than
    ``zero``, or None if the matrix is 2:4."""
    counts = (matrix.unflatten(1, (-1, 4)) != zero).sum(2)
    if not counts.numel() or int(counts.max()) <= 2:
        return None
    row, four = divmod(int(counts.argmax()), counts.shape[1])
    return row, 4 * four, int(counts.max())


@dataclass(frozen=True, slots=True)
class SemiSparseWeightConfig(FormatConfig):
    """Configuration of 2:4 sparse int8 weights with float activations: the two larger of every four weights are stored.

    In torchao's configuration of the same name the stored weights keep their dtype; here they are int8.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        scale: "absmax" computes each scale from its group's range, "search" chooses the one with the smallest error;
            None is "absmax".
        pruned: whether the weights are 2:4 already; then a weight that is not raises an error. Otherwise the smaller
            two of every four weights are set to 0.

    Raises:
        TypeError: pruned is not a bool.
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.sparsify_(model, lowbit.semi_sparse_weight())
    """

    group_size: int | None = None
    _: KW_ONLY
    scale: str | None = None
    pruned: bool = False
    function: ClassVar[str] = "semi_sparse_weight"
    x_format: ClassVar[tuple[str, str]] = ("float", "float")
    """The x_format of weights without groups, and of weights with groups."""

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
    """Configuration of 2:4 sparse int8 weights with activations that are rounded to int8 on the fly: the two larger of
    every four weights are stored.

    Args:
        group_size: 32, 64, 128, 256, or None for one scale per output channel.
        scale: "absmax" computes each scale from its group's range, "search" chooses the one with the smallest error;
            None is "absmax".
        pruned: whether the weights are 2:4 already; then a weight that is not raises an error. Otherwise the smaller
            two of every four weights are set to 0.

    Raises:
        TypeError: pruned is not a bool.
        ValueError: an argument is outside its accepted values; the message names it.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_semi_sparse_weight())
    """

    function: ClassVar[str] = "int8_dynamic_activation_int8_semi_sparse_weight"
    x_format: ClassVar[tuple[str, str]] = ("int8_row", "int8_group")


int8_dynamic_activation_int8_semi_sparse_weight = Int8DynamicActivationInt8SemiSparseWeightConfig
