# SPDX-License-Identifier: Apache-2.0
"""JoinedTensors: a matrix of a model that a file divides into tensors whose rows are not rows of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """The tensors of a matrix ``[n, k]``.

    The codes of such tensors belong to other groups than those of the matrix, which therefore stays float.

    Args:
        tensors: their names in a layer.
        join: returns the matrix for the values of the tensors.
        split: returns the values of the tensors for the matrix; the inverse of ``join``.
    """

    tensors: tuple[str, ...]
    join: Callable[[PreTrainedConfig, Sequence[Tensor]], Tensor]
    split: Callable[[PreTrainedConfig, Tensor], tuple[Tensor, ...]]

    def shapes(self, config: PreTrainedConfig, n: int, k: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors."""
        return [tuple(part.shape) for part in self.split(config, torch.empty(n, k, device="meta"))]
